"""Targets: which models are hosted or refused, and caches whose rows are independent."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    GenerationConfig,
    LlamaConfig,
)

import truedraft
from models import V, tiny
from truedraft import DraftTree, Refused
from truedraft.caches.rows import RowCache
from truedraft.targets import hosting
from truedraft.targets.decoder import DecoderTarget, Prompt
from truedraft.targets.hosting import check_exact

_SMALL = dict(vocab_size=V, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)


REFUSED = {
    "not generative": (
        lambda: AutoModel.from_config(BertConfig(**_SMALL, intermediate_size=32)).eval(),
        "not generative",
    ),
    "training mode": (
        lambda: AutoModelForCausalLM.from_config(LlamaConfig(**_SMALL, intermediate_size=32)).train(),
        r"model\.eval\(\)",
    ),
    "not a model": (lambda: torch.nn.Linear(2, 2), "not a model of transformers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused_in_one_sentence(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(Refused, match=words) as error:
        truedraft.accelerate(make())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("own", [{}, {"max_length": 30}, {"max_new_tokens": 30}])
def test_checking_a_model_raises_no_warnings(own: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str, *_: object) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(transformers.generation.utils.logger, "warning", fail)
    model = tiny()
    monkeypatch.setattr(model, "generation_config", GenerationConfig(**own))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        truedraft.accelerate(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_that_ignores_its_mask_is_refused(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    model = tiny(dtype=dtype)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, attention_mask=None, position_ids=None, **k: forward(*a, **k))
    target = DecoderTarget.__new__(DecoderTarget)
    DecoderTarget.__init__(target, tiny("qwen2", dtype))
    target.model = model
    with pytest.raises(Refused, match="differs from plain decoding"):
        check_exact(target)


@pytest.mark.parametrize(
    ("architecture", "ignored"),
    [("llama", "attention_mask"), ("gemma2", "attention_mask"), ("qwen3", "attention_mask"), ("qwen3", "position_ids")],
)
def test_what_a_pass_ignores_moves_more_positions_than_rounding(
    monkeypatch: pytest.MonkeyPatch, architecture: str, ignored: str
) -> None:
    """In half precision, where single positions may differ, a pass that ignores either differs at more than those."""
    target = DecoderTarget(tiny(architecture, torch.bfloat16), runtime="stock")
    forward = target.model.forward

    def ignoring(*args: Any, **inputs: Any) -> Any:
        of_a_tree = inputs["input_ids"].shape[1] == 5  # tokens
        return forward(*args, **(inputs | {ignored: None}) if of_a_tree else inputs)

    found: list[Tensor] = []
    differences = hosting._differences
    monkeypatch.setattr(hosting, "_differences", lambda *a: found.append(differences(*a)) or found[-1])
    check_exact(target)
    assert (found[-1] > 0.25).sum() <= 1
    monkeypatch.setattr(target.model, "forward", ignoring)
    with pytest.raises(Refused, match="differs from plain decoding"):
        check_exact(target)
    assert (found[-1] > 0.25).sum() > hosting.STRAYS


@pytest.mark.parametrize(("dtype", "pads"), [(torch.bfloat16, True), (torch.float32, False)])
def test_half_precision_has_a_second_text(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pads: bool) -> None:
    """Before padding counts as what changes a text; in fp32 the first one tells."""
    target, compared, texts = DecoderTarget(tiny(dtype=dtype)), hosting._compared, list[list[int]]()

    def first_differs(target: DecoderTarget, ids: list[int], befores: list[list[int]]) -> None:
        texts.append(ids)
        if len(texts) == 1:
            raise hosting._Differs("rounding")
        compared(target, ids, befores)

    monkeypatch.setattr(hosting, "_compared", first_differs)
    check_exact(target)
    assert target.pads == pads and (texts[0] != texts[1]) == pads and len(texts) == 2


def test_a_model_is_asked_for_its_own_decoding_once_while_it_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = tiny.__wrapped__("llama"), list[object]()
    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda *a, **k: asked.append(a) or generate(*a, **k))

    def hosted_again() -> int:
        before = len(asked)
        truedraft.accelerate(model, draft=None)
        return len(asked) - before

    assert hosted_again() and not hosted_again()
    model.model.norm.variance_epsilon *= 2
    assert hosted_again() and not hosted_again()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert hosted_again() and not hosted_again()
    model.lm_head.weight.data.neg_()  # which torch does not count
    assert hosted_again() and not hosted_again(), "it is not refused for what was remembered"


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes() -> None:
    fast = truedraft.accelerate(tiny())
    with pytest.raises(Refused, match=r"needs [\d,]{12,} bytes"):
        fast.generate(torch.tensor([[3, 4]]), max_new_tokens=10**10)


def test_release_moves_the_last_row_into_the_slot() -> None:
    target = DecoderTarget(tiny())
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    target.reserve(3, 16)
    target.prefill([Prompt(torch.tensor(p)) for p in prompts])
    target.commit([(0,)] * 3)
    target.release(0)
    assert target.cache is not None and target.cache.lengths == [4, 2]
    scores = target.score([DraftTree.chain(20), DraftTree.chain(21)]).logits[:, 0]
    for row, ids in zip(scores, ([10, 11, 12, 13, 20], [8, 9, 21]), strict=True):
        with torch.no_grad():
            assert torch.allclose(row, target.model(torch.tensor([ids])).logits[0, -1], atol=1e-9)


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_a_temporary_cache_leaves_the_other_cache_unchanged(runtime: str) -> None:
    target = DecoderTarget(tiny("llama", torch.float32), runtime)
    assert target.reserved == (0, 0)
    target.reserve(1, 16)
    target.prefill([target.prompt(torch.tensor([5, 6, 7]))])
    target.commit([(0,)])
    with pytest.raises(ZeroDivisionError), target.temporary_cache(2, 40):
        assert target.reserved == (2, 40)
        target.prefill([target.prompt(torch.tensor([9, 10, 11, 12, 13]))] * 2)
        target.score([DraftTree.chain(14, [15, 16])] * 2)
        raise ZeroDivisionError
    assert target.reserved == (1, 16)
    scored = target.score([DraftTree.chain(20)]).logits[0, 0]
    with torch.no_grad():
        assert torch.allclose(scored, target.model(torch.tensor([[5, 6, 7, 20]])).logits[0, -1], atol=1e-3)
    target.free()
    assert target.reserved == (0, 0) and target.cache is None


def test_commit_gathers_a_path_that_is_not_a_prefix() -> None:
    cache = RowCache(1, 1, 8)
    cache.lengths.append(2)
    cache.cursor.begin(0, 1, 5, torch.device("cpu"))
    values = torch.arange(5.0).reshape(1, 1, 5, 1)
    cache.layers[0].update(values, values + 10)
    cache.commit(0, (0, 2, 4))
    assert cache.lengths == [5]
    assert cache.layers[0].keys[0, 0, 2:5, 0].tolist() == [0, 2, 4]
    assert cache.layers[0].values[0, 0, 2:5, 0].tolist() == [10, 12, 14]
