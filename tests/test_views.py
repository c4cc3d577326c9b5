"""Views: a pass under a view equals that of a model without the skipped layers, and does not affect later passes."""

from __future__ import annotations

import copy
import random
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

import truedraft
from drafters_for_tests import SelfDrafter, skipping
from models import ARCHITECTURES, NO_FP64, PER_LAYER, RECURRENT, SHARING, V, ragged, tiny
from nets import RULES, drafter, generated, text_net
from test_runtime import BOTH, leaves, random_tree, words
from test_seq2seq import ARCHITECTURES as PAIRS
from test_seq2seq import sources
from test_seq2seq_passes import prompts_of
from test_seq2seq_passes import target_of as seq2seq_target
from truedraft import DraftTree, Refused
from truedraft.bench.replay import ReplayTarget
from truedraft.runtime import compiled, linears, native
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.forward import LinearsPass
from truedraft.runtime.graphs import GraphPass
from truedraft.runtime.programs import PROGRAMS
from truedraft.runtime.seq2seq_programs import SEQ2SEQ_PROGRAMS
from truedraft.runtime.skipping import SkippableLayers
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.seq2seq import Seq2SeqTarget
from truedraft.tree import Prompt, Taps
from truedraft.views._base import WHOLE, View
from truedraft.views.early_exit import EarlyExit
from truedraft.views.skip_layers import SkipLayers
from truedraft.views.skipdecode import SkipDecode

COMPILED = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
LAYERS = 4
SKIPPED = [(1,), (0, 2), (2, 3)]  # one in the middle, the first and another, an early exit
LENGTHS = (13, 1, 6)  # of prompts; behind the second nothing is committed


def in_turn(architectures: Sequence[str]) -> list[Any]:
    """(architecture, skipped layers): one of SKIPPED for each, in turn, and under `make real` the others."""
    return [
        pytest.param(name, skipped, marks=[pytest.mark.slow][: (i + j) % 3 != 0], id=f"{name}-{skipped}")
        for i, name in enumerate(architectures) for j, skipped in enumerate(SKIPPED)
    ]  # fmt: skip


def deep(architecture: str, dtype: torch.dtype) -> PreTrainedModel:
    return tiny(architecture, dtype, layers=LAYERS)


def cut(model: PreTrainedModel, skipped: Sequence[int]) -> Any:
    """A copy of the model without some of its decoder layers, with a matching configuration."""
    made: Any = copy.deepcopy(model)
    body, config = made.get_decoder(), made.config.get_text_config(decoder=True)
    body = getattr(body, "model", body)  # Llama 4's decoder is a language model
    name = next(name for name in ("layers", "h", "block", "blocks") if hasattr(body, name))
    layers = list(getattr(body, name))
    kept = [i for i in range(len(layers)) if i not in skipped]
    setattr(body, name, nn.ModuleList(layers[i] for i in kept))
    if hasattr(body, "rope_types"):  # of each layer
        body.rope_types = [body.rope_types[i] for i in kept]
    for new, old in enumerate(kept):
        for module in layers[old].modules():
            for index in ("layer_idx", "layer_id"):
                if hasattr(module, index):
                    setattr(module, index, new)
    for listed in PER_LAYER:
        if isinstance(getattr(config, listed, None), list):
            setattr(config, listed, [getattr(config, listed)[i] for i in kept])
    if model.config.is_encoder_decoder:
        setattr(config, "decoder_layers" if hasattr(config, "decoder_layers") else "num_decoder_layers", len(kept))
    else:
        config.num_hidden_layers = len(kept)
    return made


EVERY = pytest.mark.parametrize("architecture", sorted(PROGRAMS.keys() - RECURRENT.keys() - SHARING))
RUNTIMES = [pytest.param("auto", marks=COMPILED), "stock", "graphs"]


def target_of(model: PreTrainedModel, runtime: str) -> DecoderTarget:
    """graphs: captured passes with a substitute for capture, so that they run on the CPU."""
    target = DecoderTarget(model, "stock" if runtime == "graphs" else runtime)
    if runtime == "graphs":
        target.runner = GraphPass(target._stock(), lambda run: run)
    return target


def cache_for(model: Any) -> DynamicCache:
    """A cache that keeps all keys, within windows or not, and those of indexers."""
    config = model.config.get_text_config(decoder=True)
    indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    return DynamicCache(config=config) if indexed else DynamicCache()


class LighterModel:
    """A lighter model after a prompt whose keys and values are the whole model's.

    skipped: the layers of the whole model that it lacks.
    """

    def __init__(self, lighter: Any, model: Any, skipped: Sequence[int], prompt: Sequence[int]):
        self.model = lighter
        self.committed = cache_for(self.model)
        if len(prompt) > 1:
            whole = cache_for(model)
            model(torch.tensor([prompt[:-1]]), past_key_values=whole, use_cache=True)
            kept = [layer for i, layer in enumerate(whole.layers) if i not in skipped]
            for i, layer in enumerate(kept):
                self.committed.update(layer.keys, layer.values, i)
                if getattr(layer, "is_indexer_initialized", False):
                    self.committed.update_indexer(layer.indexer_keys, i)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(n, V) logits at tokens that follow the prompt without its last token."""
        cache = copy.deepcopy(self.committed)
        return self.model(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True).logits[0]


class CutModel(LighterModel):
    """A model without some of its layers."""

    def __init__(self, model: Any, skipped: Sequence[int], prompt: Sequence[int]):
        super().__init__(cut(model, skipped), model, skipped, prompt)


def error(mine: Tensor, plain: Tensor) -> float:
    return float((mine.double() - plain.double()).abs().max() / plain.double().std())


def begun(target: DecoderTarget, prompts: Sequence[Sequence[int]], capacity: int = 64) -> DecoderTarget:
    target.reserve(len(prompts), capacity)
    target.prefill([Prompt(torch.tensor(p)) for p in prompts])
    return target


@torch.no_grad()
def check_against_cut(target: DecoderTarget, skipped: Sequence[int], tolerance: float) -> None:
    """See `check_against_lighter`."""
    check_against_lighter(target, skipping(skipped), cut(target.model, skipped), tolerance, skipped)


@torch.no_grad()
def check_against_lighter(
    target: DecoderTarget, view: View, lighter: Any, tolerance: float, skipped: Sequence[int] = ()
) -> None:
    """Two trees in consecutive passes, a path of the first kept, and a chain continued into a third pass."""
    rng = random.Random(4)
    prompts = [words(rng, n) for n in LENGTHS]
    begun(target, prompts)
    models = [LighterModel(lighter, target.model, skipped, prompt) for prompt in prompts]
    behind = [list[int]() for _ in prompts]
    for sizes in ((5, 9, 1), (4, 2, 7), (1, 1, 1)):
        trees = [
            random_tree(rng, prompt[-1] if not text else 3, n)
            for prompt, text, n in zip(prompts, behind, sizes, strict=True)
        ]
        scores = target.score(trees, view)
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                path = [tree.tokens[i] for i in tree.path(node)]
                plain = models[row].logits(behind[row] + path)[-1]
                assert error(scores.logits[row, node], plain) < tolerance, (sizes, row, node)
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.advance(view, paths)
        for text, tree, path in zip(behind, trees, paths, strict=True):
            text += [tree.tokens[i] for i in path]
    target.cache = None


@pytest.mark.parametrize(("architecture", "skipped"), in_turn(sorted(ARCHITECTURES.keys() - SHARING)))
def test_the_logits_are_those_of_a_cut_model(architecture: str, skipped: tuple[int, ...]) -> None:
    """By the model's own forward: chains and trees, rows of different lengths, several passes."""
    dtype, tolerance = (torch.float32, 1e-3) if architecture in NO_FP64 else (torch.float64, 1e-6)
    check_against_cut(DecoderTarget(deep(architecture, dtype), "stock"), skipped, tolerance)


@COMPILED
@pytest.mark.parametrize(("architecture", "skipped"), in_turn(sorted(PROGRAMS.keys() - RECURRENT.keys() - SHARING)))
def test_the_logits_of_the_compiled_pass_are_those_of_a_cut_model(architecture: str, skipped: tuple[int, ...]) -> None:
    target = DecoderTarget(deep(architecture, torch.float32), strict=True)
    assert target.fallback_reason is None
    check_against_cut(target, skipped, 1e-3)


# ---------------------------------------------------------------- attention or feed-forward of a layer

HALVES = "1a;2f"
NO_HALVES = "halves of layers? .* cannot be skipped: attention and feed-forward are not"
SUMMED = {"codegen", "falcon", "gpt_neox", "gptj", "phi"}  # the compiled pass adds both up first
UNCALLED = {"biogpt", "bloom", "granitemoeshared", "granitemoe_swa", "opt", "xglm"}  # no module computes just one
PARTS: dict[str, tuple[list[str], list[str]]] = {  # modules of a half, where they have other names
    "bloom": (["self_attention.dense"], ["mlp.dense_4h_to_h"]),
    **dict.fromkeys(("biogpt", "opt", "xglm"), (["self_attn"], ["fc2"])),
    "granitemoe": (["self_attn"], ["block_sparse_moe"]),
    **dict.fromkeys(("granitemoe_swa", "granitemoeshared"), (["self_attn"], ["block_sparse_moe", "shared_mlp"])),
}
USUAL = ["self_attn", "attn", "attention", "self_attention"], ["mlp", "feed_forward"]


class Muted(nn.Module):
    """A module whose result counts for nothing."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = self.module(*args, **kwargs)
        return tuple(map(self._nothing, returned)) if isinstance(returned, tuple) else self._nothing(returned)

    @staticmethod
    def _nothing(value: Any) -> Any:
        return value * 0 if isinstance(value, Tensor) else value


def muted(model: PreTrainedModel) -> Any:
    """A copy of the model without the halves in HALVES: what its modules return is set to zero."""
    made: Any = copy.deepcopy(model)
    layers = next(m for m in made.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)
    architecture = made.config.get_text_config().model_type
    for layer, names in zip((layers[1], layers[2]), PARTS.get(architecture, USUAL), strict=True):
        for name in names:
            outer, _, inner = name.rpartition(".")
            if hasattr(layer, outer or inner):
                within = layer.get_submodule(outer)
                setattr(within, inner, Muted(getattr(within, inner)))
    return made


@torch.no_grad()
def check_against_muted(target: DecoderTarget, tolerance: float) -> None:
    """A path kept of a tree, then a tree behind it; the rows start without committed KV, which halves would share."""
    rng, view = random.Random(3), skipping(HALVES)
    begun(target, [[7], [9]])
    plain, behind = muted(target.model), [list[int](), list[int]()]
    for sizes in ((6, 9), (4, 1)):
        trees = [random_tree(rng, 3, n) for n in sizes]
        scores = target.score(trees, view).logits
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                text = behind[row] + [tree.tokens[i] for i in tree.path(node)]
                assert error(scores[row, node], plain(torch.tensor([text])).logits[0, -1]) < tolerance
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.advance(view, paths)
        for text, tree, path in zip(behind, trees, paths, strict=True):
            text += [tree.tokens[i] for i in path]


@pytest.mark.covering(1)
@pytest.mark.parametrize("runtime", RUNTIMES[:2])
@pytest.mark.parametrize("architecture", sorted(PROGRAMS.keys() - RECURRENT.keys() - SHARING))
def test_halves_of_layers_are_skipped_or_refused(architecture: str, runtime: str) -> None:
    target = target_of(deep(architecture, torch.float32), runtime)
    try:
        target.check_view(skipping(HALVES))
    except Refused as refused:
        assert re.search(NO_HALVES, str(refused))
        assert architecture in (SUMMED if runtime == "auto" else UNCALLED)
    else:
        assert architecture not in (SUMMED if runtime == "auto" else UNCALLED)
        check_against_muted(target, 1e-3)


@COMPILED
def test_linear_layers_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 0)
    target = DecoderTarget(deep("persimmon", torch.float32))
    assert isinstance(target.runner, LinearsPass)
    check_against_cut(target, (0, 2), 1e-3)


def test_passes_beside_captured_graphs() -> None:
    check_against_cut(target_of(deep("llama", torch.float32), "graphs"), (1,), 1e-3)


@pytest.mark.covering(1)
@COMPILED
@BOTH
@EVERY
def test_the_bits_are_those_of_a_cut_model_s_compiled_pass(architecture: str, dtype: torch.dtype) -> None:
    """Its keys and values copied from the whole model's cache, hidden states compared too."""
    rng, skipped = random.Random(8), (0, 2)
    view = skipping(skipped, Taps((0, 1, 3, -1)))
    prompts = [words(rng, n) for n in LENGTHS]
    target = begun(DecoderTarget(deep(architecture, dtype), strict=True), prompts)
    other = DecoderTarget(cut(target.model, skipped), strict=True)
    assert target.fallback_reason is None and other.fallback_reason is None
    begun(other, prompts)
    assert target.cache is not None and other.cache is not None
    for layer, old in zip(other.cache.layers, (1, 3), strict=True):
        layer.keys.copy_(target.cache.layers[old].keys)
        layer.values.copy_(target.cache.layers[old].values)
    other.taps = Taps((0, 1, -1))
    for sizes in ((6, 3, 11), (2, 8, 1)):
        trees = [random_tree(rng, 3, n) for n in sizes]
        mine, plain = target.score(trees, view), other.score(trees)
        paths = [tree.path(len(tree) - 1) for tree in trees]
        for row, tree in enumerate(trees):
            assert torch.equal(mine.logits[row, : len(tree)], plain.logits[row, : len(tree)])
            for layer, theirs in ((0, 0), (1, 0), (3, 1), (-1, -1)):
                assert torch.equal(mine.hidden[layer][row], plain.hidden[theirs][row]), layer
        target.advance(view, paths)
        other.commit(paths)


@pytest.mark.covering(1)
@COMPILED
@BOTH
@EVERY
def test_a_node_has_the_same_bits_however_it_is_scored(architecture: str, dtype: torch.dtype) -> None:
    check_same_bits(deep(architecture, dtype), skipping((1,)))


def check_same_bits(model: PreTrainedModel, view: View, lengths: Sequence[int] = (17, 1, 5)) -> None:
    """In one tree, or token by token through scratch, alone or beside other rows: no tolerance."""
    rng, capacity = random.Random(6), max(lengths) + 64
    prompts = [words(rng, n) for n in lengths]
    target = begun(DecoderTarget(model, strict=True), prompts, capacity)
    trees = [random_tree(rng, prompt[-1], n) for prompt, n in zip(prompts, (9, 20, 1), strict=True)]
    together = target.score(trees, view).logits
    alone = DecoderTarget(model, strict=True)
    for row, tree in enumerate(trees):
        for leaf in leaves(tree):
            for given, slot in ((alone, 0), (target, row)):
                if given is alone:
                    begun(alone, [prompts[row]], capacity)
                given.rewind()
                for node in tree.path(leaf):
                    own = given.score([DraftTree.chain(tree.tokens[node])], view, [slot]).logits
                    given.advance(view, [[0]], [slot])
                    assert torch.equal(own[0, 0], together[row, node])


def drafted(target: DecoderTarget, view: View, rng: random.Random) -> None:
    """Passes of a drafter: trees, chains, some rows alone, and at the end a rewind."""
    assert target.cache is not None
    rows = len(target.cache.lengths)
    trees = [random_tree(rng, 3, rng.randint(1, 6)) for _ in range(rows)]
    target.score(trees, view)
    target.advance(view, [tree.path(len(tree) - 1) for tree in trees])
    for slot in range(rows):
        target.score([DraftTree.chain(5, [6])], view, [slot])
        target.advance(view, [[0, 1] if slot else []], [slot])
    target.rewind()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_neox"])
def test_views_do_not_affect_the_whole_model(architecture: str, runtime: str) -> None:
    check_unaffected(deep(architecture, torch.float32), runtime, skipping((0, 2)), (0, 2))


def check_unaffected(
    model: PreTrainedModel, runtime: str, view: View, skipped: Sequence[int] = (), lengths: Sequence[int] = LENGTHS
) -> None:
    """Committed keys and values stay to the bit, and so do the passes that follow, as if nothing had been drafted."""
    rng = random.Random(2)
    prompts = [words(rng, n) for n in lengths]
    target, plain = (begun(target_of(model, runtime), prompts, max(lengths) + 64) for _ in range(2))
    assert target.cache is not None and plain.cache is not None
    for _ in range(4):
        lengths = list(target.cache.lengths)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in target.cache.layers]
        drafted(target, view, rng)
        assert target.cache.lengths == lengths and target.cache.cursor.scratch == []
        for layer, (keys, values) in zip(target.cache.layers, before, strict=True):
            for slot, length in enumerate(lengths):
                assert torch.equal(layer.keys[slot, :, :length], keys[slot, :, :length])
                assert torch.equal(layer.values[slot, :, :length], values[slot, :, :length])
        for i in skipped:
            assert torch.equal(target.cache.layers[i].keys, before[i][0]), "a skipped layer has no scratch"
        trees = [random_tree(rng, 3, n) for n in (4, 7, 1)]
        mine, theirs = target.score(trees), plain.score(trees)
        assert torch.equal(mine.logits, theirs.logits)
        for both in (target, plain):
            both.commit([tree.path(len(tree) - 1) for tree in trees])


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("dropped_by", ["rewind", "score", "commit", "crop", "release", "prefill"])
def test_scratch_is_dropped(dropped_by: str, runtime: str) -> None:
    """By everything that moves the committed positions before it."""
    model, view = deep("llama", torch.float32), skipping((1,))
    prompts = [[5, 6, 7, 8], [9, 10]]
    both = [target_of(model, runtime) for _ in range(2)]
    for target, scratch in zip(both, (True, False), strict=True):
        target.reserve(3, 32)
        target.prefill([Prompt(torch.tensor(p)) for p in prompts])
        target.score([DraftTree.chain(8, [3]), DraftTree.chain(10, [4])])
        if scratch:
            target.score([DraftTree.chain(8, [1, 2]), DraftTree.chain(10, [3, 4])], view)
            target.advance(view, [[0, 1], [0, 1, 2]])
            assert target.cache is not None and target.cache.cursor.scratch == [2, 3]
        if dropped_by == "score" or not scratch:
            target.score([DraftTree.chain(8, [3]), DraftTree.chain(10, [4])])
        if dropped_by == "rewind":
            target.rewind()
        elif dropped_by == "commit":
            target.commit([[], []])
        elif dropped_by == "crop":
            target.crop(0, 2)
        elif dropped_by == "release":
            target.release(0)
        elif dropped_by == "prefill":
            target.prefill([Prompt(torch.tensor([3, 2, 1]))])
    first, second = (target.cache for target in both)
    assert first is not None and second is not None
    assert first.cursor.scratch == [] and first.lengths == second.lengths
    trees = [DraftTree.chain(11, [12])] * len(first.lengths)
    assert torch.equal(both[0].score(trees, view).logits, both[1].score(trees, view).logits)


def test_scratch_stays_within_the_cache() -> None:
    target = begun(DecoderTarget(deep("llama", torch.float32)), [[5, 6, 7, 8], [9]], capacity=8)
    view = skipping((1,))
    target.score([DraftTree.chain(8, [1]), DraftTree.chain(9, [1])], view)
    target.advance(view, [[0, 1], []])
    target.score([DraftTree.chain(2), DraftTree.chain(9, [1, 2])], view)
    assert target.cache is not None
    before = [layer.keys.clone() for layer in target.cache.layers]
    with pytest.raises(Refused, match=r"scratch of skip-layers needs 9 positions of a row, the cache has 8: .* width"):
        target.score([DraftTree.chain(2, [3, 4, 5])], view, [0])
    assert target.cache.lengths == [3, 0]
    assert all(torch.equal(layer.keys, kept) for layer, kept in zip(target.cache.layers, before, strict=True))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_lighter_view_may_continue_another_s_scratch_but_no_heavier_one(runtime: str) -> None:
    """Depth may decay along a draft: a lighter view reads the other's scratch in its own layers."""
    prompt, first, second = [5, 6, 7, 8], skipping((1,)), skipping((1, 2))
    model = deep("llama", torch.float32)
    target = begun(target_of(model, runtime), [prompt])
    target.score([DraftTree.chain(8, [9])], first)
    target.advance(first, [[0, 1]])
    mine = target.score([DraftTree.chain(10)], second).logits[0, 0]
    target.advance(second, [[0]])
    with pytest.raises(Refused, match=r"skip-layers runs layers \[2\], which have not written the scratch: rewind"):
        target.score([DraftTree.chain(11)], first)
    target.rewind()
    target.score([DraftTree.chain(8)], first)
    with torch.no_grad():
        whole = CutModel(model, (), prompt)
        kept = copy.deepcopy(whole.committed)
        halfway = CutModel(model, (1,), prompt)
        halfway.model(torch.tensor([[8, 9]]), past_key_values=halfway.committed, use_cache=True)
        joined = DynamicCache()
        for new, (old, at) in enumerate(
            ((0, 0), (3, 2))
        ):  # layers of the whole model, and their indices in the first view
            assert torch.equal(halfway.committed.layers[at].keys[:, :, :3], kept.layers[old].keys)
            joined.update(halfway.committed.layers[at].keys, halfway.committed.layers[at].values, new)
        plain = cut(model, (1, 2))(torch.tensor([[10]]), past_key_values=joined, use_cache=True).logits[0, 0]
    assert error(mine, plain) < 1e-4


def test_skipdecode_runs_both_ends_and_less_of_the_upper_one_along_a_draft() -> None:
    view = SkipDecode(warm=2, most=0.9, least=0.3, levels=3)
    ran = [sorted({*range(10)} - view.at(depth).reduction(10).layers) for depth in range(5)]
    assert ran == [[0, 1, *range(3, 10)], [0, 1, 5, 6, 7, 8, 9], [0, 1, 7, 8, 9], [0, 1, 9], [0, 1, 9]]
    assert view.at(0) == view and [view.at(1).at(0), view.at(3)] == [view.at(1), view.at(9)]
    assert SkipDecode(warm=3, most=0.0, least=0.0).reduction(4).layers == {3}, "what warms up always runs"
    with pytest.raises(Refused, match=r"skipdecode:least=0.5 is above most=0.4: depth falls along a draft"):
        SkipDecode(most=0.4, least=0.5)
    with pytest.raises(Refused, match=r"skipdecode:warm=4: the decoder has 4 layers, leave out at least one"):
        truedraft.accelerate(deep("llama", torch.float32), draft="skipdecode:warm=4")


def test_a_text_drafted_at_falling_depth_is_that_of_model_generate() -> None:
    """Drafts that begin with the whole model are right at first, and less so the deeper they get."""
    model, inputs = tiny("llama", torch.float32, sharpen=1.5, layers=LAYERS), ragged(tiny("llama", torch.float32), 4)
    lengths = []
    for least in (1.0, 0.5):
        draft = f"skipdecode:most=1.0,least={least},levels=2,depth=4,nodes=4"
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        mine = fast.generate(**inputs, max_new_tokens=30, do_sample=False)
        assert torch.equal(mine, generated(model, inputs, max_new_tokens=30, do_sample=False).text)
        lengths.append(fast.report().mean_acceptance_length)
    assert lengths[0] > lengths[1] > 2, "the first level is drafted by all layers"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_scratch_of_rows_is_independent(runtime: str) -> None:
    """A row's scratch does not depend on other rows."""
    model, view, rng = deep("qwen3", torch.float32), skipping((2,)), random.Random(9)
    prompts = [words(rng, n) for n in LENGTHS]
    target = begun(target_of(model, runtime), prompts)
    target.score([random_tree(rng, 3, 5)], view, [1])
    target.advance(view, [[0, 1]], [1])
    mine = target.score([DraftTree.chain(4, [5]), DraftTree.chain(6)], view, [0, 2])
    assert mine.logits.shape[:2] == (2, 2) and len(mine.context) == 2
    alone = begun(target_of(model, runtime), [prompts[0], prompts[2]])
    theirs = alone.score([DraftTree.chain(4, [5]), DraftTree.chain(6)], view).logits
    assert error(mine.logits[0], theirs[0]) < 1e-4 and error(mine.logits[1, 0], theirs[1, 0]) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_hidden_states_are_numbered_as_in_the_whole_model(runtime: str) -> None:
    """The state after a skipped layer is the one before it, so that a head may read the state of any layer."""
    model = deep("llama", torch.float32)
    target = begun(target_of(model, runtime), [[7]])
    hidden = target.score([DraftTree.chain(7, [8, 9])], skipping((1, 3), Taps((0, 1, 2, 3, 4, -1)))).hidden
    plain = cut(model, (1, 3))(torch.tensor([[7, 8, 9]]), output_hidden_states=True).hidden_states
    assert torch.equal(hidden[1][0], hidden[2][0]) and torch.equal(hidden[3][0], hidden[4][0])
    for mine, theirs in ((0, 0), (1, 1), (-1, 2)):
        assert error(hidden[mine][0], plain[theirs][0]) < 1e-4
    normed = model.model.norm(hidden[3][0])  # changed by the last norm only
    assert error(normed, plain[2][0]) < 1e-4


class NoView(View):
    """The whole model, by the contract's defaults."""


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_view_that_changes_nothing_is_the_whole_model(runtime: str) -> None:
    target = begun(target_of(deep("llama", torch.float32), runtime), [[5, 6, 7], [8]])
    trees = [random_tree(random.Random(1), 3, n) for n in (5, 2)]
    under, whole = target.score(trees, NoView()).logits, target.score(trees).logits
    for row, tree in enumerate(trees):  # those of captured passes are padded otherwise
        assert error(under[row, : len(tree)], whole[row, : len(tree)]) < 1e-5


@pytest.mark.covering(1)
@pytest.mark.parametrize("control", ["fixed", "cost"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "own forward"])
def test_a_text_drafted_by_a_view_is_that_of_model_generate(dtype: torch.dtype, rule: str, control: str) -> None:
    """Batches of different lengths that end at different times; the view is right often enough to be accepted."""
    model = tiny("llama", dtype, sharpen=1.5, layers=LAYERS)
    inputs = ragged(model, 5)
    for skipped in SKIPPED:
        settings = dict(max_new_tokens=30, eos_token_id=[11, 12], pad_token_id=0, **{"do_sample": False, **RULES[rule]})
        plain = generated(model, inputs, **settings)
        fast = truedraft.accelerate(model, draft=SelfDrafter(skipped), control=control)
        torch.manual_seed(5)
        assert torch.equal(fast.generate(**inputs, **settings), plain.text)
        assert torch.equal(torch.get_rng_state(), plain.state)
        if control == "fixed":
            assert fast.report().acceptance_rate > 0.05, "nothing that was drafted was accepted"


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "persimmon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_drafts_of_a_view_that_skips_nothing_are_all_accepted(dtype: torch.dtype, architecture: str, rule: str) -> None:
    """Scratch contains what passes of the whole model would have committed."""
    model = deep(architecture, dtype)
    report = text_net(model, "view-whole", ragged(model, 3), max_new_tokens=31, **{"do_sample": False, **RULES[rule]})
    assert report.acceptance_rate == 1.0


def test_rows_of_several_drafters_and_none_in_one_engine() -> None:
    model = tiny("llama", torch.float32, layers=LAYERS)
    fast = truedraft.accelerate(model, draft=None)
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [15]]
    drafts: list[Any] = [SelfDrafter((1,)), None, SelfDrafter((0, 3), size=5), drafter("token-recycling", model)]
    with fast.engine(max_rows=3, max_tokens=64) as engine:
        requests = [
            engine.add_request(torch.tensor(p), draft=d, max_new_tokens=9 + 7 * i, do_sample=False)
            for i, (p, d) in enumerate(zip(prompts, drafts, strict=True))
        ]
        while engine.has_unfinished_requests():
            engine.step()
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        plain = model.generate(torch.tensor([prompt]), max_new_tokens=9 + 7 * i, do_sample=False)
        assert request.tokens == plain[0, len(prompt) :].tolist()


@COMPILED
@pytest.mark.parametrize("kind", SEQ2SEQ_PROGRAMS)
def test_encoder_decoders_by_the_compiled_pass(kind: str) -> None:
    """The decoder without its first or last layer, with sources whose keys every layer has."""
    target = seq2seq_target(kind, torch.float32)
    skipped = {1} if "t5" in kind else {0}  # T5's biases are in the first layer, which a cut model needs
    prompts = [prompt for i, prompt in enumerate(prompts_of([[4]] * 4, torch.float32)) if i != 3]
    target.reserve(len(prompts), 32)
    target.prefill(prompts)
    tree = random_tree(random.Random(3), 4, 9)
    scores = target.score([tree] * len(prompts), skipping(skipped)).logits
    other = cut(target.model, sorted(skipped))
    for row, prompt in enumerate(prompts):
        assert prompt.states is not None and prompt.source_mask is not None
        for leaf in range(len(tree)):
            ids = torch.tensor([[tree.tokens[i] for i in tree.path(leaf)]])
            with torch.no_grad():
                plain = other(
                    encoder_outputs=BaseModelOutput(last_hidden_state=prompt.states[None]),
                    attention_mask=prompt.source_mask[None], decoder_input_ids=ids,
                ).logits[0, -1]  # fmt: skip
            assert error(scores[row, leaf], plain) < 1e-3


@COMPILED
def test_an_encoder_decoder_that_drafts_for_itself() -> None:
    """A decoder of more layers than its encoder."""
    config = CONFIG_MAPPING["bart"](**{**PAIRS["bart"], "encoder_layers": 1, "decoder_layers": 4})
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    fast = truedraft.accelerate(model, draft=SelfDrafter((3,)), control="fixed")
    settings = dict(max_new_tokens=20, do_sample=False, num_beams=1)
    assert torch.equal(fast.generate(**sources(), **settings), model.generate(**sources(), **settings))


# ---------------------------------------------------------------- refusals


def test_nonexistent_layers_are_refused() -> None:
    for runtime in ("auto", "stock", "graphs"):
        target = target_of(deep("llama", torch.float32), runtime)
        for layers in ((4,), (0, 9)):
            with pytest.raises(Refused, match=r"layers \[\d\] cannot be skipped: the decoder has layers 0 to 3"):
                target.check_view(skipping(layers))
            begun(target, [[5, 6]])
            with pytest.raises(Refused, match="cannot be skipped"):
                target.score([DraftTree.chain(6)], skipping(layers))
    with pytest.raises(Refused, match="layers"):
        truedraft.accelerate(tiny(), draft=SelfDrafter((2,)))


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_encoder_decoders_by_their_own_forward_are_refused(kind: str) -> None:
    assert kind in PAIRS
    target = Seq2SeqTarget(seq2seq_target(kind, torch.float32).model, "stock")
    with pytest.raises(Refused, match=r"cannot run under a view .* need the compiled pass"):
        target.check_view(skipping((0,)))
    target.reserve(1, 16)
    prompts = prompts_of([[4]] * 4, torch.float32)[:1]
    target.prefill(prompts)
    with pytest.raises(Refused, match="cannot run under a view"):
        target.score([DraftTree.chain(4)], skipping((0,)))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("architecture", sorted(SHARING))
def test_layers_that_others_depend_on_are_not_skipped(architecture: str, runtime: str) -> None:
    with pytest.raises(Refused, match=r"some read the keys and values of others|do not simply follow each other"):
        target_of(tiny(architecture, torch.float32), runtime).check_view(skipping((0,)))


def test_a_replay_has_no_view() -> None:
    with pytest.raises(Refused, match="recording"):
        ReplayTarget(V).score([DraftTree.chain(1)], skipping((0,)))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda layers, config: layers[1].register_forward_pre_hook(lambda *_: None), "hooks or replaced forwards"),
        (lambda layers, config: setattr(config, "num_kv_shared_layers", 1), "keys and values of others"),
        (lambda layers, config: layers.append(layers[0]), "not found"),
    ],
)
def test_layers_that_cannot_be_skipped_are_refused(spoil: Any, why: str) -> None:
    model: Any = copy.deepcopy(deep("llama", torch.float32))
    target = DecoderTarget(model, "stock")
    spoil(model.model.layers, model.config)
    with pytest.raises(Refused, match=f"layers of LlamaForCausalLM cannot be skipped: .*{why}"):
        target.check_view(skipping((1,)))


def test_layers_that_do_not_follow_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is given twice what the one before returned."""
    model: Any = deep("llama", torch.float32)
    doubled = lambda self, x, *args, **kwargs: nn.Module.__call__(self, 2 * x, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(type(model.model.layers[0]), "__call__", doubled)
    with pytest.raises(Refused, match="do not simply follow each other"):
        DecoderTarget(model, "stock").check_view(skipping((1,)))


@COMPILED
def test_the_number_of_cached_views_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations are cached for a limited number of sets of layers, and made again after that."""
    monkeypatch.setattr(compiled, "VARIANTS", 3)
    target = begun(DecoderTarget(deep("llama", torch.float32)), [[5, 6, 7]])
    seen = [target.score([DraftTree.chain(7)], skipping({i, j})).logits for i in range(4) for j in range(4)]
    again = [target.score([DraftTree.chain(7)], skipping({i, j})).logits for i in range(4) for j in range(4)]
    assert isinstance(target.runner, CompiledPass) and len(target.runner._variants) == 3
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))
    assert len({str(logits) for logits in seen}) == 10


def test_layers_that_pass_on_more_than_hidden_states_are_refused() -> None:
    """T5's first layer makes the biases by distance that the others add."""
    stack: Any = seq2seq_target("t5", torch.float32).model.get_decoder()
    with pytest.raises(Refused, match="the layers of T5Stack cannot be skipped: they do not simply follow each other"):
        SkippableLayers(stack, len(stack.block))


def test_other_threads_call_the_whole_model_meanwhile() -> None:
    """And after the pass the model is unchanged."""
    model: Any = deep("llama", torch.float32)
    target, ids = begun(DecoderTarget(model, "stock"), [[5, 6]]), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        plain, seen = model(ids).logits, list[Tensor]()

        def beside(*_: Any) -> None:
            with torch.no_grad():
                seen.append(model(ids).logits)

        def call_in_thread(*_: Any) -> None:
            hook.remove()
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()

        hook = model.lm_head.register_forward_hook(call_in_thread)
        under = target.score([DraftTree.chain(6, [7])], skipping((0, 1))).logits
        assert torch.equal(seen[0], plain) and torch.equal(model(ids).logits, plain)
    assert error(under[0, -1], plain[0, -1]) > 0.1
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_views_are_compared_by_value() -> None:
    assert SkipLayers("1-3") == SkipLayers("1-3") and hash(SkipLayers("1-3")) == hash(SkipLayers("1-3"))
    assert SkipLayers("1;2;3").reduction(4) == SkipLayers("3;1-2").reduction(4) == EarlyExit(1).reduction(4)
    assert NoView().reduction(3) == WHOLE and NoView().taps == Taps()
