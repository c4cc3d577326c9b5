"""Encoder-decoders with unusual inputs and models: as the model alone, or refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSpeechSeq2Seq,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    MarianConfig,
    MarianMTModel,
)
from transformers.modeling_outputs import BaseModelOutput

import models as decoders
import truedraft
from model_types import built
from test_seq2seq import _BART, both, sources, tiny
from truedraft import Refused

_MOONSHINE: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
    encoder_num_attention_heads=4, decoder_num_attention_heads=4, encoder_num_key_value_heads=4,
    decoder_num_key_value_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
SHORT: dict[str, Any] = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)


def marian(encoder: int, decoder: int, pad: int = 0) -> MarianMTModel:
    """Large random weights, and a vocabulary for either side."""
    torch.manual_seed(0)
    config = {**_BART, "vocab_size": encoder, "decoder_vocab_size": decoder, "pad_token_id": pad, "init_std": 0.3}
    return MarianMTModel(MarianConfig(**config, share_encoder_decoder_embeddings=False)).eval()


@pytest.mark.parametrize("made", [lambda mask: mask * 255, lambda mask: mask.float(), lambda mask: mask.bool()])
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_attention_masks_of_other_dtypes_and_values(kind: str, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = sources()
    given["attention_mask"] = made(given["attention_mask"])
    expected, found = both(truedraft.accelerate(tiny(kind)), **given)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    decoder = decoders.tiny("llama", torch.float32)
    prompt = torch.arange(5, 15)[None]
    expected = tiny("bart").generate(**sources(), **SHORT), decoder.generate(prompt, **SHORT)
    try:
        torch.set_default_dtype(dtype)
        found = (
            truedraft.accelerate(tiny("bart")).generate(**sources(), **SHORT),
            truedraft.accelerate(decoder).generate(prompt, **SHORT),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(("encoder", "decoder"), [(200_000, 40), (61, 40), (61, 90)])
def test_source_and_target_vocabularies_may_differ(encoder: int, decoder: int) -> None:
    """The source has other token ids than the output."""
    model = marian(encoder, decoder)
    ids = torch.tensor([[encoder - 1, encoder // 2, 7, 8], [9, encoder - 3, 11, 12]])
    for runtime in ("auto", "stock"):
        fast = truedraft.accelerate(model, runtime=runtime)
        assert torch.equal(fast.generate(ids, **SHORT), model.generate(ids, **SHORT))


def test_any_size_of_vocabulary_can_be_hosted() -> None:
    """Padding is the last token, as in Marian."""
    for size in range(40, 52):
        truedraft.accelerate(marian(size, size, pad=size - 1))


def test_autocast_is_refused_where_it_would_be_ignored() -> None:
    compiled, stock = (truedraft.accelerate(tiny("t5"), runtime=runtime) for runtime in ("auto", "stock"))
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(Refused, match="autocast is on, which the compiled pass does not follow"):
            compiled.generate(**sources(), **SHORT)
        assert torch.equal(stock.generate(**sources(), **SHORT), tiny("t5").generate(**sources(), **SHORT))


class Doubling(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def another_bias(model: Any) -> None:
    model.final_logits_bias = 3 * torch.randn(model.final_logits_bias.shape, generator=torch.Generator().manual_seed(1))


def another_class(model: Any) -> None:
    layer = model.decoder.block[0].layer[1].EncDecAttention
    kept, layer.o = layer.o, Doubling(layer.o.in_features, layer.o.out_features, bias=False)
    layer.o.weight = kept.weight


def another_weight(model: Any) -> None:
    parametrize.register_parametrization(model.encoder.block[1].layer[1].DenseReluDense.wo, "weight", Twice())


@pytest.mark.parametrize(("kind", "change"), [("bart", another_bias), ("t5", another_class), ("t5", another_weight)])
def test_changes_between_calls_are_detected(kind: str, change: Callable[[Any], None]) -> None:
    model = copy.deepcopy(tiny(kind))
    fast = truedraft.accelerate(model)
    before = fast.generate(**sources(), **SHORT)
    change(model)
    expected = model.generate(**sources(), **SHORT)
    assert not torch.equal(expected, before)
    assert torch.equal(fast.generate(**sources(), **SHORT), expected)


def test_global_module_hooks_are_called() -> None:
    fast, calls = truedraft.accelerate(tiny("bart")), []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    try:
        fast.generate(**sources(), **SHORT)
    finally:
        hook.remove()
    assert calls.count("BartDecoderLayer") > 2


@pytest.mark.parametrize("start", [[2, 7, 0, 9], [0, 7, 8], [2, 0, 0, 0, 9]])
def test_padding_in_decoder_prompts(start: list[int]) -> None:
    given = dict(decoder_input_ids=torch.tensor([start] * 4), do_sample=True)
    for kind in ("m2m_100", "t5"):
        expected, found = both(truedraft.accelerate(tiny(kind)), **given)
        assert torch.equal(expected, found)


def test_every_position_can_be_used() -> None:
    fast = truedraft.accelerate(tiny("bart"))
    expected, found = both(fast, max_new_tokens=128, min_new_tokens=128)
    assert found.shape[1] == 129 and torch.equal(expected, found)
    with pytest.raises(Refused, match="max_new_tokens to at most 128"):
        fast.generate(**sources(), max_new_tokens=129)


def test_given_encoder_states() -> None:
    fast, given = truedraft.accelerate(tiny("bart")), sources()
    states = tiny("bart").get_encoder()(**given).last_hidden_state
    encoded = dict(encoder_outputs=BaseModelOutput(last_hidden_state=states), input_ids=None)
    expected, found = both(fast, **encoded)
    assert torch.equal(expected, found)
    with pytest.raises(Refused, match=r"attention_mask is .*4, 8.*4, 12"):
        fast.generate(**encoded, attention_mask=given["attention_mask"][:, :8])


def test_a_source_that_is_masked_throughout_is_refused() -> None:
    given = sources()
    given["attention_mask"][1] = 0
    with pytest.raises(Refused, match="a source is empty"):
        truedraft.accelerate(tiny("t5")).generate(**given, **SHORT)


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_composites_of_two_models_are_refused(runtime: str) -> None:
    half = BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )  # fmt: skip
    config = EncoderDecoderConfig.from_encoder_decoder_configs(half, half)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = EncoderDecoderModel(config).eval()
    with pytest.raises(Refused, match="cannot be hosted exactly"):
        truedraft.accelerate(model, runtime=runtime)


@pytest.mark.parametrize("made", [tuple, list])
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_given_encoder_states_in_a_tuple(kind: str, made: Callable[[Any], Any]) -> None:
    model, given = tiny(kind), sources()
    states = model.get_encoder()(**given).last_hidden_state
    expected, found = both(truedraft.accelerate(model), **given, encoder_outputs=made((states,)))
    assert torch.equal(expected, found)


_BEGUN = torch.tensor([[2, 5, 6]] * 4)
INVALID: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "nothing of an encoder": (lambda g: {**g, "encoder_outputs": ()}, "encoder_outputs begins with a NoneType"),
    "a dict": (lambda g: {**g, "encoder_outputs": {"last_hidden_state": g["input_ids"]}}, "encoder_outputs"),
    "states of two dimensions": (lambda g: {**g, "encoder_outputs": (torch.zeros(4, 32),)}, r"\(4, 32\)"),
    "one dimension": (lambda g: {"input_ids": g["input_ids"][0]}, "input_ids is torch.int64"),
    "floats": (lambda g: {"input_ids": g["input_ids"].float()}, "torch.float32"),
    "no rows": (lambda g: {"input_ids": g["input_ids"][:0]}, r"\(0, "),
    "no tokens": (lambda g: {"input_ids": g["input_ids"][:, :0]}, "is empty"),
    "an unknown token": (lambda g: {"input_ids": g["input_ids"] + 1000}, "vocabulary"),
    "a shorter mask": (lambda g: {**g, "attention_mask": g["attention_mask"][:, 2:]}, "attention_mask is"),
    "a mask for one row": (lambda g: {**g, "attention_mask": g["attention_mask"][:1]}, "attention_mask is"),
    "a mask of four dimensions": (lambda g: {**g, "attention_mask": g["attention_mask"][:, None, None]}, "mask is"),
    "an unknown beginning": (lambda g: {**g, "decoder_input_ids": _BEGUN + 1000}, "decoder_input_ids.*vocabulary"),
    "a beginning of one dimension": (lambda g: {**g, "decoder_input_ids": _BEGUN[0]}, "decoder_input_ids is"),
    "a shorter mask of the beginning": (
        lambda g: {**g, "decoder_input_ids": _BEGUN, "decoder_attention_mask": torch.ones(4, 2)},
        "decoder_attention_mask is",
    ),
    "a mask of another beginning": (lambda g: {**g, "decoder_attention_mask": torch.ones(4, 3)}, "decoder_attention"),
}


@pytest.mark.parametrize("case", INVALID)
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_invalid_sources_are_refused(kind: str, case: str) -> None:
    change, words = INVALID[case]
    with pytest.raises(Refused, match=words) as error:
        truedraft.accelerate(tiny(kind)).generate(**change(sources()), **SHORT)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("whisper", "WhisperForConditionalGeneration"), ("seamless_m4t", "SeamlessM4TForTextToText")],
)
def test_models_with_a_generate_of_their_own_are_refused(kind: str, name: str) -> None:
    with pytest.raises(Refused, match=f"{name} cannot be hosted exactly: it overrides generate"):
        truedraft.accelerate(built(kind, name))


@pytest.mark.parametrize("runtime", ["auto", "stock"])
def test_sounds_of_different_lengths(runtime: str) -> None:
    """The encoder shortens them, and returns the mask of its states."""
    torch.manual_seed(0)
    model = AutoModelForSpeechSeq2Seq.from_config(CONFIG_MAPPING["moonshine"](**_MOONSHINE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    mask = torch.ones(3, 9000, dtype=torch.long)
    mask[1, 5000:], mask[2, 2000:] = 0, 0
    sounds = torch.randn(3, 9000, generator=torch.Generator().manual_seed(1)) * mask
    fast = truedraft.accelerate(model, control="fixed", runtime=runtime)
    for settings in ({}, {"do_sample": True}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}):
        found = []
        for generate in (model.generate, fast.generate):
            torch.manual_seed(4)
            found.append(generate(input_values=sounds, attention_mask=mask, **{**SHORT, **settings}))
        assert torch.equal(*found)
    assert not fast.target.shared_vocabulary
