"""Tapped layers: those of a plain forward at every node, whichever pass computes them, in memory only where chosen."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import truedraft
from drafters_for_tests import HiddenReader
from model_types import built
from models import ARCHITECTURES, STREAMS, V, ragged, tiny
from test_seq2seq import ARCHITECTURES as SEQ2SEQ
from test_seq2seq import tiny as tiny_seq2seq
from truedraft import DraftTree, Refused
from truedraft.runtime import forward, linears, native, nodes
from truedraft.runtime.forward import LinearsPass
from truedraft.runtime.tapping import LayerTaps
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.seq2seq import Seq2SeqTarget
from truedraft.tree import Prompt, Scores, Taps

BLOCKS = 3
LAYERS = (0, 1, 2, 3, -1)
PASSES = ("stock", "compiled", "linears")
COMPILED = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")


def target_of(architecture: str, kind: str) -> DecoderTarget:
    """A target of three blocks whose passes are of one kind; skips where there is none for the architecture."""
    if kind != "stock" and native.library() is None:
        pytest.skip("the compiled pass was not built on this machine")
    model = tiny(architecture, torch.float32, layers=BLOCKS)
    target = DecoderTarget(model, "auto" if kind == "compiled" else "stock")
    if kind == "compiled" and target.fallback_reason:
        pytest.skip(target.fallback_reason)
    if kind == "linears":
        target.runner = LinearsPass(model, target.layer_types, target.window)
    target.taps = Taps(LAYERS)
    return target


def last_block(stack: Any) -> nn.Module:
    """The last block of a decoder, found by the names of its class."""
    stack = getattr(stack, "model", stack)  # Llama 4's decoder is a language model
    return next(getattr(stack, name)[-1] for name in ("layers", "h", "block", "blocks") if hasattr(stack, name))


@torch.no_grad()
def plain_states(model: Any, **inputs: Any) -> dict[int, Tensor]:
    """Layer -> (length, H) of a plain forward; the last block's output by a hook on it."""
    raw: list[Tensor] = []

    def keep(_: nn.Module, given: Any, output: Any) -> None:
        raw.append((output if isinstance(output, Tensor) else output[0]).clone())

    handle = last_block(model.get_decoder()).register_forward_hook(keep)
    try:
        out = model(**inputs, use_cache=False, output_hidden_states=True)
    finally:
        handle.remove()
    states = out.decoder_hidden_states if "decoder_input_ids" in inputs else out.hidden_states
    blocks = len(states) - 1
    return {**{k: states[k][0] for k in range(blocks)}, blocks: raw[0][0], -1: states[-1][0]}


def close(mine: Tensor, plain: Tensor) -> None:
    assert mine.shape == plain.shape
    assert (mine.float() - plain).abs().max() < 1e-4 * max(float(plain.abs().max()), 1.0)


def features_of(states: dict[int, Tensor], layers: Sequence[int]) -> Tensor:
    return torch.cat([states[layer] for layer in layers], -1)


def random_tree(rng: random.Random, root: int, nodes: int) -> DraftTree:
    parents = tuple([-1] + [rng.randrange(max(0, i - 3), i) for i in range(1, nodes)])
    return DraftTree((root, *(rng.randrange(V) for _ in range(nodes - 1))), parents)


def net(target: DecoderTarget, lengths: Sequence[int] = (7, 1, 12)) -> None:
    """Every tapped layer at every node of random trees, and at every position of the prompts."""
    rng, layers = random.Random(5), target.taps.hidden
    texts = [[rng.randrange(V) for _ in range(n)] for n in lengths]
    target.reserve(len(texts), 64)
    read = target.prefill([Prompt(torch.tensor(ids)) for ids in texts])
    for row, ids in enumerate(texts):
        plain = plain_states(target.model, input_ids=torch.tensor([ids]))
        close(read.features(row, (0,), layers), features_of(plain, layers))
    target.commit([[]] * len(texts))
    for sizes in ((5, 9, 1), (8, 2, 6)):
        trees = [random_tree(rng, ids[-1], n) for ids, n in zip(texts, sizes, strict=True)]
        scores = target.score(trees)
        for row, (ids, tree) in enumerate(zip(texts, trees, strict=True)):
            for node in range(len(tree)):
                path = tree.path(node)
                whole = ids[:-1] + [tree.tokens[i] for i in path]
                plain = plain_states(target.model, input_ids=torch.tensor([whole]))
                close(scores.features(row, path, layers), features_of(plain, layers)[-len(path) :])
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.commit(paths)
        texts = [
            ids[:-1] + [tree.tokens[i] for i in path] + [rng.randrange(V)]
            for ids, tree, path in zip(texts, trees, paths, strict=True)
        ]
    target.cache = None


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in STREAMS])
def test_layers_are_those_of_a_plain_forward(architecture: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 0)
    net(target_of(architecture, kind))


@pytest.mark.parametrize("kind", ["stock", "compiled"])
@pytest.mark.parametrize("architecture", sorted(STREAMS))
def test_several_hidden_states_of_a_token_are_not_tapped(architecture: str, kind: str) -> None:
    with pytest.raises(Refused, match="a layer has several of each token"):
        target_of(architecture, kind).check_taps(Taps((1,)))


@pytest.mark.parametrize("kind", PASSES)
def test_layers_of_prompts_in_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 0)
    monkeypatch.setattr(nodes, "PROMPT", 5)
    net(target_of("qwen3", kind))


@COMPILED
def test_layers_of_long_prompts_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a compiled pass, read by the model's own forward."""
    monkeypatch.setattr(forward, "PART", 4)
    monkeypatch.setattr(forward, "ROOM", 0)
    target = target_of("qwen3", "compiled")
    target.long = 2
    net(target)


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", ["stock", "auto"])
@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_layers_of_encoder_decoders_are_the_decoder_s(kind: str, runtime: str) -> None:
    target = Seq2SeqTarget(tiny_seq2seq(kind), runtime)
    target.taps = Taps((0, 1, 2, -1))
    states = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(2))
    mask, texts = torch.ones(2, 6, dtype=torch.long), [[3, 4, 5], [6]]
    target.reserve(2, 32)
    prompts = [
        Prompt(torch.tensor(ids), states=s, source_mask=m) for ids, s, m in zip(texts, states, mask, strict=True)
    ]
    read = target.prefill(prompts)
    target.commit([[]] * 2)
    tree = DraftTree((5, 7, 8, 9), (-1, 0, 0, 2))
    scored = target.score([tree, tree])
    for row, ids in enumerate(texts):
        for scores, path, whole in ((read, (0,), ids), (scored, (0, 2, 3), ids[:-1] + [5, 8, 9])):
            plain = plain_states(
                target.model, encoder_outputs=BaseModelOutput(last_hidden_state=states[row : row + 1]),
                decoder_input_ids=torch.tensor([whole]),
            )  # fmt: skip
            found = scores.features(row, path, target.taps.hidden)
            close(found, features_of(plain, target.taps.hidden)[-len(found) :])


def shifted(layer: int, blocks: int) -> int:
    return layer + 1 if 0 <= layer < blocks else layer


def normed(layer: int, blocks: int) -> int:
    return -1 if layer == blocks else layer


@pytest.mark.parametrize("fault", [shifted, normed])
@pytest.mark.parametrize("kind", ["stock", "compiled"])
def test_another_layer_is_noticed(kind: str, fault: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama", kind)
    where = "truedraft.runtime.variants" if kind == "compiled" else "truedraft.runtime.tapping"
    net(target)  # without the fault, and checked before it
    monkeypatch.setattr(f"{where}.layer_number", fault)
    with pytest.raises(AssertionError):
        net(target)


def test_layers_that_are_not_those_returned_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks in another order are detected, and `output_hidden_states` is used instead."""
    model = tiny("llama", torch.float32, layers=BLOCKS)
    found = LayerTaps(model)
    monkeypatch.setattr("truedraft.runtime.tapping.blocks_of", lambda model, _: list(model.model.layers)[::-1])
    other = LayerTaps(model)
    with pytest.raises(Refused, match=r"^layer=3: the output of the last block of LlamaForCausalLM is not found, give"):
        other.number(3)
    ids = torch.tensor([[5, 6, 7]])
    plain = plain_states(model, input_ids=ids)
    for taps, layers in ((found, (0, 1, 2, 3, -1, -2, -4)), (other, (0, 1, 2, -1, -2, -4))):
        with taps.recording(layers) as states, torch.no_grad():
            model(ids)
        assert states.keys() == set(layers)
        for layer, state in states.items():
            close(state[0], plain[layer if layer >= -1 else layer + 4])


@pytest.mark.parametrize(("kind", "name"), [("mllama", "MllamaForCausalLM"), ("bert", "BertLMHeadModel")])
def test_a_layer_that_the_head_does_not_read_is_refused(kind: str, name: str) -> None:
    """BERT's head transforms the last of the `output_hidden_states` before it reads; Mllama's reads it."""
    model = built(kind, name)
    taps, target = LayerTaps(model), DecoderTarget(model, "stock")
    if kind == "bert":
        with pytest.raises(Refused, match=f"^layer=-1: the output head of {name} ") as refused:
            target.check_taps(Taps((-1,)))
        assert "\n" not in str(refused.value)
    layers, ids = (0, 1, {"mllama": -1, "bert": 2}[kind]), torch.tensor([[5, 6, 7]])
    with taps.recording(layers) as states, torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
    assert all(torch.equal(states[layer], expected[layer]) for layer in layers)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("layer", [4, -5])
def test_layers_that_the_model_has_not_are_refused(kind: str, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 0)
    target = target_of("llama", kind)
    target.taps = Taps((layer,))
    target.reserve(1, 16)
    why = f"^layer={layer}: give 0 .* to 3 .* 3 blocks.*, or -1 .* to -4"
    with pytest.raises(Refused, match=why):
        target.prefill([Prompt(torch.tensor([3, 4]))])
    with pytest.raises(Refused, match=why):
        target.check_taps(target.taps)


def test_a_drafter_or_rule_that_taps_another_layer_is_refused_before_the_first_pass() -> None:
    model = tiny("llama", torch.float32)

    @dataclass
    class Deep(HiddenReader):
        needs = Taps((7,))

    with pytest.raises(Refused, match=r"^layer=7: give 0"):
        truedraft.accelerate(model, draft=Deep(head=model.lm_head))
    fast = truedraft.accelerate(model, rule="greedy")
    fast.rule.needs = Taps((7,))
    with pytest.raises(Refused, match=r"^layer=7: give 0"):
        fast.generate(**ragged(model, 2), max_new_tokens=4, do_sample=False, pad_token_id=0)


@contextmanager
def outputs_observed(model: Any) -> Iterator[list[weakref.ref[Tensor]]]:
    """References to the output of every block."""
    refs: list[weakref.ref[Tensor]] = []
    handles = [
        block.register_forward_hook(lambda _, given, output: refs.append(weakref.ref(output)))
        for block in model.model.layers
    ]
    yield refs
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("layers", [*(pytest.param(few, marks=pytest.mark.slow) for few in ((), (1,))), (3, 1), (-1,)])
def test_only_chosen_layers_stay_in_memory(layers: tuple[int, ...]) -> None:
    model = tiny("llama", torch.float32, layers=BLOCKS)
    taps, ids = LayerTaps(model), torch.tensor([[5, 6, 7]])

    def alive(**given: Any) -> list[int]:
        with outputs_observed(model) as refs, taps.recording(layers) as states, torch.no_grad():
            out = model(ids, **given)
            gc.collect()
            kept = [block for block, ref in enumerate(refs, 1) if ref() is not None]
            assert states.keys() == set(layers) and out is not None
        return kept

    assert alive() == sorted(layer for layer in layers if layer > 0)
    assert {1, 2} <= set(alive(output_hidden_states=True)), "the net notices what is kept"


def test_passes_request_no_other_hidden_states() -> None:
    target = target_of("llama", "stock")
    target.check_taps(target.taps)
    target.taps = Taps((2,))
    target.reserve(1, 16)
    outputs: list[Any] = []
    handle = target.model.register_forward_hook(lambda _, given, output: outputs.append(output))
    try:
        target.prefill([Prompt(torch.tensor([3, 4]))])
        target.score([DraftTree.chain(4, [5])])
    finally:
        handle.remove()
    assert outputs and all(output.hidden_states is None for output in outputs[-2:])


def test_models_are_not_searched_where_nothing_is_tapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.runtime.forward.LayerTaps", None)
    target = target_of("llama", "stock")
    target.taps = Taps()
    target.check_taps(target.taps)
    target.reserve(1, 16)
    assert target.prefill([Prompt(torch.tensor([3, 4]))]).hidden == {}
    assert target.score([DraftTree.chain(4, [5])]).hidden == {}


def test_hooks_and_replaced_forwards_change_what_is_recorded() -> None:
    model = copy.deepcopy(tiny("llama", torch.float32, layers=BLOCKS))
    blocks = model.model.layers
    own = blocks[0].forward
    blocks[0].forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.5
    blocks[2].register_forward_hook(lambda _, given, output: output + 0.25)
    target = DecoderTarget(model, "stock")
    target.taps = Taps(LAYERS)
    net(target)
    assert not any("_call_impl" in vars(module) for module in model.modules())


def test_other_threads_are_not_affected() -> None:
    """While one thread records, another's forwards and text are as before, and are not recorded."""
    model = tiny("llama", torch.float32, layers=BLOCKS)
    given = dict(**ragged(model, 3), max_new_tokens=12, do_sample=False, pad_token_id=0)
    taps, expected = LayerTaps(model), model.generate(**given)
    found: list[Tensor] = []
    with taps.recording(LAYERS) as states:
        thread = threading.Thread(target=lambda: found.append(model.generate(**given)))
        thread.start()
        thread.join()
        assert states == {}
        with torch.no_grad():
            model(torch.tensor([[5, 6]]))
        assert states.keys() == set(LAYERS) and all(state.shape[:2] == (1, 2) for state in states.values())
    assert torch.equal(found[0], expected)
    assert not any("_call_impl" in vars(module) for module in model.modules())


def scores_of(context: Sequence[int], sizes: Sequence[int]) -> Scores:
    g = torch.Generator().manual_seed(4)
    hidden = {
        layer: [torch.randn(c + n, 5, generator=g) for c, n in zip(context, sizes, strict=True)] for layer in (0, 2, -1)
    }
    return Scores(torch.zeros(len(sizes), max(sizes), 3), hidden, context)


@pytest.mark.parametrize("path", [(), (0,), (0, 1, 2), (0, 2, 3), (2,), (1, 3), (3, 4), range(5), range(1, 3)])
@pytest.mark.parametrize("layers", [(2,), (-1, 0), (0, 2, -1)])
def test_features_are_entries_of_the_states(path: Sequence[int], layers: tuple[int, ...]) -> None:
    scores = scores_of((0, 4), (5, 5))
    for row, before in enumerate(scores.context):
        entries = [*range(before), *(before + node for node in path)]
        expected = torch.tensor(
            [[float(x) for layer in layers for x in scores.hidden[layer][row][i]] for i in entries]
        ).reshape(len(entries), 5 * len(layers))
        assert torch.equal(scores.features(row, path, layers), expected)


def test_features_of_adjacent_nodes_are_not_copied() -> None:
    scores = scores_of((0, 4), (5, 5))
    for row, path, first in ((0, (0, 1, 2), 0), (0, (2, 3), 2), (1, (0,), 0), (1, range(5), 0)):
        state = scores.hidden[2][row]
        assert scores.features(row, path, (2,)).data_ptr() == state[first:].data_ptr()
