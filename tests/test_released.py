"""Weights that are kept in panels alone: the same bits, half the memory, and a model that still answers."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import truedraft
from models import ragged, tiny
from truedraft.errors import Refused
from truedraft.runtime import native
from truedraft.runtime import released as in_panels
from truedraft.runtime.panels import panels
from truedraft.runtime.processors import processor
from truedraft.runtime.released import PanelTensor, bytes_in_panels, release_weights
from truedraft.runtime.releasing import in_call
from truedraft.runtime.weights import Weight

pytestmark = pytest.mark.skipif(
    native.library() is None or "avx512f" not in processor(), reason="compiled passes make no copies on this machine"
)
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(37, 96), (16, 16), (130, 48), (3, 32, 48)]
ONCE = "kept once, in the order in which compiled passes read them, and cannot be"


def kept_in_panels(matrix: torch.Tensor) -> PanelTensor:
    return PanelTensor(panels(Weight(matrix.flatten(0, -2), None, None)).values, matrix.shape, matrix.dtype)


def given(model: object, rows: int) -> dict[str, object]:
    return dict(**ragged(model, rows), max_new_tokens=9, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_matrix_that_was_given(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape).to(dtype)
    kept = kept_in_panels(matrix)
    assert kept.shape == shape and kept.dtype == dtype and kept.qdata.nbytes < 1.5 * matrix.nbytes
    assert torch.equal(kept.dequantize(), matrix) and torch.equal(kept.float(), matrix.float())
    assert torch.equal(kept[len(kept) // 2], matrix[len(matrix) // 2]) and torch.equal(kept.mT, matrix.mT)
    x = torch.randn(2, 5, shape[-1]).to(dtype)
    pairs = [(kept, matrix)] if len(shape) == 2 else [(kept[i], matrix[i]) for i in range(3)]
    for one, plain in pairs:
        bias = torch.randn(len(plain)).to(dtype)
        expected = nn.functional.linear(x, plain, bias)
        assert torch.equal(nn.functional.linear(x, one, bias), expected)
        with torch.no_grad(), in_call():
            found = nn.functional.linear(x, one, bias)
        assert (found - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1) * expected.abs().max()
        ids = torch.randint(len(plain), (3, 4))
        assert torch.equal(nn.functional.embedding(ids, one), nn.functional.embedding(ids, plain))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "phi3", "mixtral", "qwen3_next", "gpt2"])
def test_texts_have_the_same_bits(architecture: str, dtype: torch.dtype) -> None:
    model = tiny.__wrapped__(architecture, dtype)
    scores = dict(return_dict_in_generate=True, output_logits=True)
    own, ids = model.generate(**given(model, 3)), torch.arange(1, 49).repeat(2, 1)
    with torch.no_grad():
        logits, of_few = model(input_ids=ids).logits, model(input_ids=ids[:1, :3]).logits
    before = truedraft.accelerate(model, strict=True).generate(**given(model, 3), **scores)
    bytes_before = sum(weight.nbytes for weight in model.parameters())
    fast = truedraft.accelerate(model, strict=True, release_weights=True)
    assert bytes_in_panels(model) > (0 if architecture == "gpt2" else 0.2 * bytes_before)
    after = fast.generate(**given(model, 3), **scores)
    assert "compiled pass" in fast.report().runtime
    assert ("kept once" in fast.report().runtime) == bool(bytes_in_panels(model))
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.logits, after.logits, strict=True))
    assert torch.equal(model.generate(**given(model, 3)), own), "its own generate is that of transformers"
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, logits) and torch.equal(model(ids[:1, :3]).logits, of_few)
    assert torch.equal(fast.generate(**given(model, 3)), before.sequences)
    assert ("made once more" in fast.report().runtime) == bool(bytes_in_panels(model))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_that_is_the_embedding_is_kept_once(dtype: torch.dtype) -> None:
    model = tiny.__wrapped__("llama", dtype)
    model.lm_head.weight = model.model.embed_tokens.weight
    plain = truedraft.accelerate(model, strict=True).generate(**given(model, 3))
    fast = truedraft.accelerate(model, strict=True, release_weights=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, PanelTensor)
    assert torch.equal(fast.generate(**given(model, 3)), plain)
    assert "copied into panels" not in fast.report().runtime, "nothing is held twice"


def test_experts_are_kept_once() -> None:
    model = tiny.__wrapped__("mixtral", torch.float32)
    names = [name for name, weight in model.named_parameters() if "experts" in name and weight.ndim == 3]
    fast = truedraft.accelerate(model, release_weights=True)
    assert names and all(isinstance(model.get_parameter(name), PanelTensor) for name in names)
    fast.generate(**given(model, 2))
    assert fast.target.runner.copied.bytes < 0.05 * bytes_in_panels(model), "routers alone are copied"


def test_weights_are_let_go() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    before = [weakref.ref(part.weight) for part in model.modules() if type(part) is nn.Linear]
    weights = sum(part.weight.nbytes for part in model.modules() if type(part) is nn.Linear)
    assert release_weights(model) == weights > 0 == release_weights(model)
    gc.collect()
    assert not any(weight() is not None for weight in before)


def test_large_weights_are_moved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = tiny.__wrapped__("llama", torch.float32), tiny.__wrapped__("llama", torch.float32)
    before.load_state_dict(model.state_dict())
    monkeypatch.setattr(in_panels, "TOGETHER", 32)
    assert release_weights(model) and len(model.lm_head.weight) == 61
    for name, weight in before.named_parameters():
        assert torch.equal(model.get_parameter(name).float(), weight), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_product_is_noticed_before_its_matrix_is_let_go(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on the checks of a hosted model multiply by the same code."""
    model = tiny.__wrapped__("llama", dtype)
    made = in_panels.panels
    monkeypatch.setattr(in_panels, "panels", lambda weight, to: made(Weight(weight.values.roll(1, 1), None, None), to))
    with pytest.raises(Refused, match="compiled products differ from those of torch"):
        truedraft.accelerate(model, release_weights=True)


@pytest.mark.parametrize("draft", ["int8-self", "int4-self", "early-exit"])
def test_drafts_of_views(draft: str) -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    expected = model.generate(**given(model, 2))
    fast = truedraft.accelerate(model, draft=draft, release_weights=True)
    assert torch.equal(fast.generate(**given(model, 2)), expected)


def test_what_truedraft_loads_is_kept_once(tmp_path: Path) -> None:
    model, tokenizer = truedraft.load("nano")
    expected = model.generate(**(asked := dict(**tokenizer("One two", return_tensors="pt"), max_new_tokens=12)))
    fast = truedraft.accelerate(model, tokenizer)
    assert bytes_in_panels(model) > 0 and torch.equal(fast.generate(**asked), expected)
    assert "kept once" in fast.report().runtime
    draft, _ = truedraft.load("nano")
    other, _ = truedraft.load("nano")
    truedraft.accelerate(other, tokenizer, draft=draft, release_weights=False).generate(**asked)
    assert bytes_in_panels(draft) > 0 == bytes_in_panels(other), "a draft model too, and not what is to be kept"


@pytest.mark.parametrize("before", [False, True], ids=["first", "after a call that keeps them once"])
@pytest.mark.parametrize(
    "settings", [{"ties": "recheck"}, {"runtime": "stock"}, {"runtime": "in-place"}, {"release_weights": False}]
)
def test_what_needs_the_weights_as_they_were_has_them(settings: dict[str, Any], before: bool) -> None:
    model, tokenizer = truedraft.load("nano")
    other, _ = truedraft.load("nano")
    if before:
        truedraft.accelerate(model, tokenizer)
        assert bytes_in_panels(model)
    truedraft.accelerate(model, tokenizer, **settings)
    truedraft.accelerate(model, tokenizer)
    assert not bytes_in_panels(model), "nor are they replaced by a later call that does not ask for it"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_near_ties_are_decided_by_the_own_products_of_a_model() -> None:
    """Compiled products of a model whose weights are kept once are not those of `model.generate`."""
    model, tokenizer = truedraft.load("nano", "bfloat16")
    asked = dict(tokenizer("One day", return_tensors="pt"), max_new_tokens=80, do_sample=False)
    expected = model.generate(**asked)
    fast = truedraft.accelerate(model, tokenizer)
    other = fast.generate(**asked)
    rechecking = truedraft.accelerate(model, tokenizer, ties="recheck")
    assert torch.equal(rechecking.generate(**asked), expected)
    assert torch.equal(fast.generate(**asked), other)
    with pytest.raises(Refused, match=r"release_weights=True.*ties='recheck'"):
        truedraft.accelerate(model, tokenizer, ties="recheck", release_weights=True)
    truedraft.accelerate(model, tokenizer, release_weights=True)
    with pytest.raises(Refused, match=r"ties='recheck' needs the model's own products"):
        rechecking.generate(**asked)


def test_a_model_that_was_given_is_not_changed() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    truedraft.accelerate(model)
    assert not bytes_in_panels(model)


def released() -> nn.Module:
    model = tiny.__wrapped__("llama", torch.float32)
    assert release_weights(model)
    return model


def train(model: nn.Module) -> None:
    ids = torch.arange(1, 9)[None]
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()


REFUSED = {
    "saved": [
        lambda model: model.state_dict(),
        lambda model: model.save_pretrained("folder"),
        lambda model: torch.save(model, "file"),
    ],
    "trained": [train],
    "converted": [lambda model: model.to(torch.bfloat16), lambda model: model.double(), lambda model: model.half()],
    "written to": [lambda model: model.lm_head.weight.data.zero_(), lambda model: nn.init.ones_(model.lm_head.weight)],
}


@pytest.mark.parametrize(("what", "call"), [(what, call) for what, calls in REFUSED.items() for call in calls])
def test_what_needs_the_originals_is_refused_in_a_sentence(
    what: str, call: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused, match=f"{ONCE} {what}.*release_weights=False"):
        call(released())  # type: ignore[operator]


def test_an_optimizer_is_refused() -> None:
    weight = released().lm_head.weight  # type: ignore[union-attr]
    weight.grad = torch.ones(weight.shape)
    with pytest.raises(Refused, match=ONCE):
        torch.optim.SGD([weight], lr=0.1).step()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT
def test_adapters_are_trained_on_it() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, plain = released(), tiny.__wrapped__("llama", torch.float32)
    config, ids, found = (
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
        torch.arange(1, 9)[None],
        [],
    )
    for one in (model, plain):
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(one, config)
        wrapped(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad for n, p in wrapped.named_parameters() if "lora" in n])
    assert found[0] and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with pytest.raises(Refused, match=ONCE):
        wrapped = peft.get_peft_model(released(), config)
        wrapped.merge_and_unload()


def test_a_copy_of_it_is_kept_once_as_well() -> None:
    model = released()
    other = copy.deepcopy(model)
    assert bytes_in_panels(other) == bytes_in_panels(model) > 0  # type: ignore[arg-type]
    assert torch.equal(other.generate(**given(other, 2)), model.generate(**given(model, 2)))  # type: ignore[operator]
    assert not {id(weight) for weight in model.parameters()} & {id(weight) for weight in other.parameters()}


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(Refused, match="training mode"):
        truedraft.accelerate(tiny.__wrapped__("llama", torch.float32).train(), release_weights=True)
