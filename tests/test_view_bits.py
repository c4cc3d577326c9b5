"""Views with weights of fewer bits: passes equal those of a model whose weights were rounded in plain torch."""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

import truedraft
from drafters_for_tests import skipping
from models import SHARING, ragged, tiny
from nets import RULES, generated
from test_runtime import BOTH, random_tree, words
from test_seq2seq_passes import prompts_of
from test_seq2seq_passes import target_of as seq2seq_target
from test_views import (
    COMPILED,
    HALVES,
    LAYERS,
    LENGTHS,
    CutModel,
    begun,
    check_same_bits,
    check_unaffected,
    cut,
    deep,
    error,
    muted,
    target_of,
)
from truedraft import DraftTree, Refused
from truedraft.errors import NoRoom
from truedraft.runtime import panels
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.programs import PROGRAMS
from truedraft.targets.decoder import DecoderTarget
from truedraft.views._base import Reduction, View
from truedraft.views._together import Together
from truedraft.views.quantized import Quantized

WEIGHTS = pytest.mark.parametrize("weights", ["int8", "int4"])
EVERY = pytest.mark.parametrize(
    "architecture",
    ["llama", "qwen3", "gemma2", "mixtral", "gpt2"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("codegen", "cohere2", "falcon")],
)
OUTLIER = 24  # times as large as the others: a row's scale is then so coarse that even int8 changes the logits
SOURCES = re.compile(r"(encoder_attn|EncDecAttention)\.[kv]")  # computed once for a source, by the whole model

pytestmark = COMPILED


def dequantised(matrix: Tensor, weights: str) -> Tensor:
    """(..., out, in), rounded to multiples of a scale."""
    width = matrix.shape[-1]
    group, most = (width, 127) if weights == "int8" else (math.gcd(width, 32), 7)
    numbers = matrix.detach().float().unflatten(-1, (-1, group))
    scale = numbers.abs().amax(-1, keepdim=True) / most
    return ((numbers / scale).round() * scale).nan_to_num(0.0).flatten(-2)  # of zeros: zeros


@torch.no_grad()
def rounded(model: Any, weights: str) -> Any:
    """A copy of the model with rounded linear layers and experts; its embeddings and routers are as before."""
    made = copy.deepcopy(model)
    for name, module in made.named_modules():
        if SOURCES.search(name):
            continue
        if isinstance(module, nn.Linear):  # a new parameter: an embedding may have the old one
            module.weight = nn.Parameter(dequantised(module.weight, weights).to(model.dtype))
        elif isinstance(module, Conv1D):
            module.weight = nn.Parameter(dequantised(module.weight.T, weights).T.contiguous().to(model.dtype))
        for experts in (p for p in module.parameters(recurse=False) if p.ndim == 3):
            experts.copy_(dequantised(experts, weights))
    return made


@torch.no_grad()
def coarse(architecture: str, dtype: torch.dtype) -> Any:
    """A model that int8 changes visibly."""
    model = copy.deepcopy(tiny(architecture, torch.float32, sharpen=1.0, layers=LAYERS))
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if weight is model.get_input_embeddings().weight:
                continue
            if weight.ndim == 3 or isinstance(module, nn.Linear):
                weight[..., 3] *= OUTLIER
            elif isinstance(module, Conv1D):
                weight[3] *= OUTLIER
    return model.to(dtype)


def rounded_after(model: Any, weights: str, prompt: Sequence[int], skipped: Sequence[int] = ()) -> CutModel:
    """A rounded model without some layers, after a prompt whose keys and values are the whole model's."""
    made = CutModel(model, skipped, prompt)
    made.model = cut(rounded(model, weights), skipped)
    return made


def largest_errors(target: DecoderTarget, view: View, oracles: Sequence[Sequence[CutModel]]) -> list[float]:
    """Of logits under the view, from those of each list of models, one per row: two trees in consecutive passes, a path
    of the first kept, and a chain continued into a third pass. The whole target, which goes on, is unchanged."""
    rng = random.Random(4)
    prompts = [words(rng, n) for n in LENGTHS]
    behind, worst = [list[int]() for _ in prompts], [0.0] * len(oracles)
    begun(target, prompts)
    for sizes in ((5, 9, 1), (4, 2, 7), (1, 1, 1)):
        trees = [
            random_tree(rng, prompt[-1] if not text else 3, n)
            for prompt, text, n in zip(prompts, behind, sizes, strict=True)
        ]
        logits = target.score(trees, view).logits
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                path = behind[row] + [tree.tokens[i] for i in tree.path(node)]
                for i, models in enumerate(oracles):
                    found = error(logits[row, node], models[row].logits(path)[-1])
                    assert math.isfinite(found)
                    worst[i] = max(worst[i], found)
        paths = [tree.path(len(tree) - 1) for tree in trees]
        target.advance(view, paths)
        for text, tree, path in zip(behind, trees, paths, strict=True):
            text += [tree.tokens[i] for i in path]
    return worst


@torch.no_grad()
def check_against_rounded(model: Any, weights: str, skipped: Sequence[int] = ()) -> None:
    """The error is a small share of what rounding changes, in bf16 by the error of the passes themselves."""
    target = DecoderTarget(model, strict=True)
    assert target.fallback_reason is None
    rng = random.Random(4)
    prompts = [words(rng, n) for n in LENGTHS]
    view: View = Quantized(weights)
    view = Together((skipping(skipped), view)) if skipped else view
    oracles = [
        [rounded_after(model, weights, prompt, skipped) for prompt in prompts],
        [CutModel(model, skipped, prompt) for prompt in prompts],
    ]
    mine, unrounded = largest_errors(target, view, oracles)
    assert mine < unrounded * (1e-3 if model.dtype == torch.float32 else 0.5), (mine, unrounded)


@pytest.mark.covering(1)
@EVERY
@BOTH
@WEIGHTS
def test_the_logits_are_those_of_a_rounded_model(architecture: str, dtype: torch.dtype, weights: str) -> None:
    check_against_rounded(coarse(architecture, dtype), weights)


@WEIGHTS
def test_layers_may_be_skipped_too(weights: str) -> None:
    check_against_rounded(coarse("llama", torch.float32), weights, (0, 2))


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_halves_of_layers_may_be_skipped_too(architecture: str) -> None:
    model = coarse(architecture, torch.float32)
    target = begun(DecoderTarget(model), [[7]])
    logits = target.score([DraftTree.chain(7, [8, 9])], Together((skipping(HALVES), Quantized()))).logits[0]
    plain, unrounded = (muted(one)(torch.tensor([[7, 8, 9]])).logits[0] for one in (rounded(model, "int8"), model))
    assert error(logits, plain) < 1e-4 < error(logits, unrounded)


@pytest.mark.covering(1)
@BOTH
@WEIGHTS
@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2"])
def test_a_node_has_the_same_bits_however_it_is_scored(architecture: str, dtype: torch.dtype, weights: str) -> None:
    check_same_bits(deep(architecture, dtype), Quantized(weights))


@WEIGHTS
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_whole_model_is_not_affected(architecture: str, weights: str) -> None:
    check_unaffected(deep(architecture, torch.float32), "auto", Quantized(weights))


@pytest.mark.parametrize("architecture", sorted(SHARING & PROGRAMS.keys()))
def test_layers_that_share_keys_and_values_are_rounded_together(architecture: str) -> None:
    """Which cannot be skipped."""
    check_unaffected(tiny(architecture, torch.float32), "auto", Quantized())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("draft", "least"), [("int8-self", 0.9), ("int4-self", 0.3), ("int8-self+skip-layers", 0.05)])
def test_a_drafted_text_is_that_of_model_generate(draft: str, least: float, rule: str) -> None:
    model = tiny("llama", torch.float32, sharpen=1.5, layers=LAYERS)
    settings = dict(max_new_tokens=30, pad_token_id=0, **{"do_sample": False, **RULES[rule]})
    plain = generated(model, ragged(model, 4), **settings)
    fast = truedraft.accelerate(model, draft=f"{draft}:top_k=1,depth=3", control="fixed")
    torch.manual_seed(5)
    assert torch.equal(fast.generate(**ragged(model, 4), **settings), plain.text)
    rate = fast.report().acceptance_rate
    assert rate is not None and rate > least


@torch.no_grad()
def scored(target: DecoderTarget, view: View, capacity: int = 64) -> Tensor:
    return begun(target, [[5, 6, 7]], capacity).score([DraftTree.chain(7, [8, 9])], view).logits


@WEIGHTS
@pytest.mark.parametrize("architecture", ["starcoder2", "mixtral", "gpt2"])
def test_weights_changed_in_place_are_rounded_again(architecture: str, weights: str) -> None:
    """Biases too; and a cache of another size is read."""
    model, view = tiny.__wrapped__(architecture, torch.float32), Quantized(weights)
    target = DecoderTarget(model)
    before = scored(target, view)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std().nan_to_num(1.0))
    after = scored(target, view, 96)
    assert not torch.equal(after, before)
    assert torch.equal(after, scored(DecoderTarget(copy.deepcopy(model)), view))


def test_targets_of_a_model_share_their_copies() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    one, other = DecoderTarget(model), DecoderTarget(model)
    assert torch.equal(scored(one, Quantized("int4")), scored(other, Quantized("int4")))
    linear = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    copies = panels.rounded_copies(model, 4)
    assert linear / 2 < copies.bytes < linear and len(copies) == 7 * len(model.model.layers) + 1
    for target in (one, other):
        assert isinstance(target.runner, CompiledPass)
        assert target.runner._rounded[4].rounded.copied is copies


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_encoder_decoders_by_the_compiled_pass(kind: str) -> None:
    """The keys and values of a source are made once, by the whole model."""
    target = seq2seq_target(kind, torch.float32)
    prompts = [prompt for i, prompt in enumerate(prompts_of([[4]] * 4, torch.float32)) if i != 3]
    target.reserve(len(prompts), 32)
    target.prefill(prompts)
    tree = random_tree(random.Random(3), 4, 9)
    scores = target.score([tree] * len(prompts), Quantized("int4")).logits
    models, worst = [rounded(target.model, "int4"), target.model], [0.0, 0.0]
    for row, prompt in enumerate(prompts):
        assert prompt.states is not None and prompt.source_mask is not None
        for leaf in range(len(tree)):
            ids = torch.tensor([[tree.tokens[i] for i in tree.path(leaf)]])
            for i, model in enumerate(models):
                plain = model(
                    encoder_outputs=BaseModelOutput(last_hidden_state=prompt.states[None]),
                    attention_mask=prompt.source_mask[None], decoder_input_ids=ids,
                ).logits[0, -1]  # fmt: skip
                worst[i] = max(worst[i], error(scores[row, leaf], plain))
    assert worst[0] < 1e-3 < worst[1] / 10


# ---------------------------------------------------------------- quantised models, refusals


@torch.no_grad()
def test_weights_in_int8_are_rounded_to_int4_and_no_others() -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from truedraft.runtime.quantize import quantize

    model: Any = tiny.__wrapped__("llama", torch.float32)
    quantize(model, "int8")
    target = DecoderTarget(model)
    with pytest.raises(Refused, match="LlamaForCausalLM cannot run under int8-self: its weights have 8 bits already"):
        target.check_view(Quantized("int8"))
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.dequantize())
    logits = begun(target, [[7]]).score([DraftTree.chain(7, [8, 9])], Quantized("int4")).logits[0]
    ids = torch.tensor([[7, 8, 9]])
    assert error(logits, rounded(plain, "int4")(ids).logits[0]) < 1e-4 < error(logits, plain(ids).logits[0])


@pytest.mark.parametrize("runtime", ["stock", "graphs"])
def test_the_model_s_own_forward_is_refused(runtime: str) -> None:
    target = target_of(deep("llama", torch.float32), runtime)
    for view in (Quantized(), Together((skipping((1,)), Quantized("int4")))):
        with pytest.raises(Refused, match="transformers forward: weights or entries of fewer bits need the compiled"):
            target.check_view(view)
    with pytest.raises(Refused, match="fewer bits need the compiled pass"):
        scored(target, Quantized())


def test_copies_that_do_not_fit_in_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    target, free = DecoderTarget(model), SimpleNamespace(available=9000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(NoRoom, match=r"the weights in 8 bits need [\d,]+ bytes, 9,000 are free"):
        target.check_view(Quantized())
    free.available = 10**6
    target.check_view(Quantized())
    free.available = 0
    DecoderTarget(model, "in-place").check_view(Quantized())  # by the copies that are there


def test_settings() -> None:
    with pytest.raises(Refused, match="quantized:weights='int2': give int8 or int4"):
        truedraft.accelerate(tiny(), draft="quantized:weights=int2")
    assert Quantized("int4").reduction(9) == Reduction(bits=4)
    one, other, whole = Reduction(bits=8), Reduction(bits=4), Reduction(frozenset({1}))
    assert one.joined(other) == other.joined(one) == other
    assert one.joined(whole) == whole.joined(one) == Reduction(frozenset({1}), bits=8)
    assert whole.joined(whole).bits == 0
