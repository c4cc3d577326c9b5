"""Prompts of every type and shape: as the model alone, or refused in one sentence before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import truedraft
from model_types import built
from models import V, tiny
from truedraft import Refused

IDS = torch.tensor([[5, 9, 7, 9, 5, 9, 7, 9], [3, 4, 3, 4, 8, 3, 4, 3]])
ONES = torch.ones_like(IDS)
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
SHORT: dict[str, Any] = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)


def same(model: PreTrainedModel, **given: Any) -> None:
    assert torch.equal(truedraft.accelerate(model).generate(**given, **SHORT), model.generate(**given, **SHORT))


def refused(model: PreTrainedModel, message: str, **given: Any) -> None:
    """Before a pass is made: the model's own `generate` is not even called."""
    fast = truedraft.accelerate(model)
    model.generate = None  # type: ignore[assignment]
    try:
        with pytest.raises(Refused, match=message) as error:
            fast.generate(**given, **SHORT)
    finally:
        del model.generate
    assert "\n" not in str(error.value)


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bool": torch.Tensor.bool,
    "floats": torch.Tensor.float,
    "int32": torch.Tensor.int,
}
STRANGE_MASKS: dict[str, tuple[Any, str]] = {
    "255 for tokens": (LEFT * 255, "numbers besides 0 and 1"),
    "255 throughout": (ONES * 255, "numbers besides 0 and 1"),
    "halves": (LEFT * 0.5, "numbers besides 0 and 1"),
    "one half": (torch.where(torch.arange(8) == 7, 0.5, 1.0).expand(2, 8), "numbers besides 0 and 1"),
    "negative": (-LEFT, "numbers besides 0 and 1"),
    "additive": ((1 - LEFT) * -1e9, "numbers besides 0 and 1"),
    "NaN": (LEFT * float("nan"), "numbers besides 0 and 1"),
    "shorter": (LEFT[:, 3:], r"attention_mask is torch.int64 of \(2, 5\)"),
    "shorter, of ones": (ONES[:, 3:], r"\(2, 5\).*\(2, 8\)"),
    "longer": (torch.cat([LEFT, ONES], 1), r"\(2, 16\)"),
    "longer, of ones": (torch.cat([ONES, ONES], 1), r"\(2, 16\)"),
    "one row of two": (LEFT[:1], r"\(1, 8\)"),
    "three rows of two": (torch.ones(3, 8), r"\(3, 8\)"),
    "one dimension": (ONES[0], r"\(8,\)"),
    "four dimensions": (torch.ones(8, 8).tril().bool().expand(2, 1, 8, 8), r"\(2, 1, 8, 8\)"),
    "a list": (LEFT.tolist(), "is a list"),
}


@pytest.mark.parametrize("made", MASKS)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_masks_of_zeros_and_ones_of_any_dtype(kind: str, made: str) -> None:
    same(tiny(kind, torch.float32), input_ids=IDS, attention_mask=MASKS[made](LEFT))


@pytest.mark.parametrize("case", STRANGE_MASKS)
def test_masks_of_other_values_and_shapes_are_refused(case: str) -> None:
    mask, message = STRANGE_MASKS[case]
    refused(tiny("gpt2", torch.float32), message, input_ids=IDS, attention_mask=mask)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_gaps_in_a_mask_have_no_position(kind: str) -> None:
    gaps = ONES.clone()
    gaps[0, 2] = gaps[1, 4] = 0
    same(tiny(kind, torch.float32), input_ids=IDS, attention_mask=gaps)


STRANGE_PROMPTS: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "one dimension": (lambda _: {"input_ids": IDS[0]}, r"input_ids is torch.int64 of \(8,\)"),
    "three dimensions": (lambda _: {"input_ids": IDS[None]}, r"\(1, 2, 8\)"),
    "floats": (lambda _: {"inputs": IDS.float()}, "torch.float32"),
    "a list": (lambda _: {"input_ids": IDS.tolist()}, "is a list"),
    "a mask alone": (lambda _: {"attention_mask": torch.ones_like(IDS)}, "attention_mask was given without a prompt"),
    "no rows": (lambda _: {"input_ids": IDS[:0]}, r"\(0, 8\)"),
    "no tokens": (lambda _: {"input_ids": IDS[:, :0]}, "is empty"),
    "a token too large": (lambda _: {"input_ids": IDS + V - 9}, f"vocabulary of {V}"),
    "a token below zero": (lambda _: {"input_ids": -IDS}, f"vocabulary of {V}"),
    "embeddings of another width": (lambda e: {"inputs_embeds": e[..., :16]}, "16 wide.*are 32"),
    "embeddings of two dimensions": (lambda e: {"inputs_embeds": e[0]}, r"\(8, 32\)"),
    "embeddings of integers": (lambda e: {"inputs_embeds": e.long()}, "give floats"),
    "embeddings and a mask of another length": (
        lambda e: {"inputs_embeds": e, "attention_mask": ONES[:, 1:]},
        r"attention_mask is torch.int64 of \(2, 7\)",
    ),
    "embeddings after ids of another length": (
        lambda e: {"inputs_embeds": e, "input_ids": IDS[:, 3:]},
        "5 tokens and inputs_embeds 8",
    ),
    "positions": (lambda _: {"input_ids": IDS, "position_ids": ONES}, "position_ids is not supported"),
}


@pytest.mark.parametrize("case", STRANGE_PROMPTS)
def test_prompts_of_invalid_types_and_shapes_are_refused(case: str) -> None:
    made, message = STRANGE_PROMPTS[case]
    model = tiny("llama", torch.float32)
    refused(model, message, **made(model.get_input_embeddings()(IDS).detach()))


def test_a_row_without_tokens_is_refused_by_its_number() -> None:
    with pytest.raises(Refused, match="the prompt of row 1 is empty"):
        truedraft.accelerate(tiny("llama", torch.float32)).generate(
            input_ids=IDS, attention_mask=torch.stack([ONES[0], 0 * ONES[1]]), max_new_tokens=2
        )


def test_embeddings_with_ids() -> None:
    model = tiny("llama", torch.float32)
    embeds = model.get_input_embeddings()(IDS).detach()
    for ids in ({}, {"input_ids": IDS}, {"input_ids": IDS[:, 3:], "attention_mask": LEFT}):
        same(model, inputs_embeds=embeds, **ids)
    same(model, inputs_embeds=embeds.bfloat16(), attention_mask=LEFT)


def test_several_samples_of_a_prompt() -> None:
    model = tiny("llama", torch.float32)
    given: dict[str, Any] = dict(input_ids=IDS, attention_mask=LEFT, **SHORT | {"do_sample": True})
    found = []
    for who in (model, truedraft.accelerate(model)):
        torch.manual_seed(3)
        found.append(who.generate(**given, num_return_sequences=3))
    assert torch.equal(*found) and len(found[0]) == 6


SEEN: dict[str, Any] = {
    "pixel_values": torch.zeros(2, 3, 8, 8),
    "image_sizes": torch.ones(2, 2),
    "labels": IDS,
}


@pytest.mark.parametrize("name", SEEN)
def test_images_are_refused_by_name(name: str) -> None:
    """Without running their encoder, which is large."""
    model = built("llava", "LlavaForConditionalGeneration")
    refused(model, f"^{name}: only texts are drafted", input_ids=IDS, **{name: SEEN[name]})


def test_token_types_of_texts_are_ignored_where_they_mark_images() -> None:
    vision = built("gemma3", "Gemma3ForConditionalGeneration")
    same(vision, input_ids=IDS, attention_mask=LEFT, token_type_ids=torch.zeros_like(IDS))
    fast = truedraft.accelerate(vision)
    assert fast.target.runtime.startswith("compiled pass")
    with pytest.raises(Refused, match="token_type_ids"):
        fast.generate(input_ids=IDS, token_type_ids=ONES, **SHORT)
    with pytest.raises(Refused, match="token_type_ids"):  # here they are embedded
        truedraft.accelerate(tiny("gpt2", torch.float32)).generate(IDS, token_type_ids=torch.zeros_like(IDS), **SHORT)


def test_other_outputs_than_text_are_refused() -> None:
    """Of Janus, which writes images by guided passes over pairs of rows; its text is its own."""
    model: Any = built("janus", "JanusForConditionalGeneration")
    fast = truedraft.accelerate(model)
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    for mode in ("image", "audio", 3, None):
        with pytest.raises(Refused, match=rf"generation_mode={mode!r}: truedraft decodes text, and lacks the heads"):
            fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, generation_mode=mode)
    settings: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    expected = model.generate(ids, **settings)
    for more in ({}, {"generation_mode": "text"}):
        assert torch.equal(fast.generate(ids, **settings, **more), expected)
    same(tiny(), input_ids=IDS, generation_mode=None)
    refused(tiny(), "generation_mode='image': truedraft decodes text", input_ids=IDS, generation_mode="image")
