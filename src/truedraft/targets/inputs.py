"""Checks the inputs of `generate`, and splits them into the prompts of rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime.embedding import check_embeddings_given
from truedraft.tree import Prompt

BLANK = {"token_type_ids", "mm_token_type_ids"}  # inputs that tokenizers fill with zeros for texts
# Model inputs that `generate` itself passes to a decode loop.
INPUTS = {
    "attention_mask",
    "cache_params",
    "decoder_attention_mask",
    "encoder_outputs",
    "inputs_embeds",
    "logits_to_keep",
    "next_sequence_length",
    "past_key_values",
    "position_ids",
    "use_cache",
}
OPTIONS = vars(GenerationConfig()).keys()


def check_sources(model: PreTrainedModel, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises Refused unless sources and decoder prompts of an encoder-decoder have valid dtypes and shapes."""
    states = read = None
    if (encoded := kwargs.get("encoder_outputs")) is not None:
        states = read = states_of(encoded)
        if not isinstance(states, Tensor) or states.dim() != 3:
            raise Refused(f"encoder_outputs begins with {_form(states)}: give states of (rows, tokens, width)")
    ids = prompt_ids(inputs, kwargs)
    if ids is not None and model.get_encoder().main_input_name == "input_ids":
        _check_ids("input_ids", ids, len(model.get_encoder().get_input_embeddings().weight))
        read = ids if states is None else states
    if (mask := kwargs.get("attention_mask")) is not None and read is not None:
        _check_mask("attention_mask", mask, read.shape[:2])
    if (begun := kwargs.get("decoder_input_ids")) is not None:
        _check_ids("decoder_input_ids", begun, len(model.get_decoder().get_input_embeddings().weight))
        if (mask := kwargs.get("decoder_attention_mask")) is not None:
            _check_mask("decoder_attention_mask", mask, begun.shape)


def check_text(model: PreTrainedModel, inputs: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises Refused unless a decoder is given text alone, with valid dtypes and shapes."""
    accepted = inspect.signature(model.forward).parameters.keys()
    for name in sorted(kwargs.keys() & accepted - INPUTS - BLANK - OPTIONS - {"input_ids"}):
        if kwargs[name] is not None:
            raise Refused(f"{name}: only texts are drafted; leave it out, or call the model's own generate")
    ids, embeds, mask = prompt_ids(inputs, kwargs), kwargs.get("inputs_embeds"), kwargs.get("attention_mask")
    table: Any = model.get_input_embeddings().weight
    if ids is not None:
        _check_ids("input_ids", ids, len(table), embeds is None)
    if embeds is not None:
        check_embeddings_given(model)
        _check_embeds(embeds, table.shape[1])
        if ids is not None and mask is None and ids.shape[1] not in (0, embeds.shape[1]):
            raise Refused(
                f"input_ids has {ids.shape[1]} tokens and inputs_embeds {embeds.shape[1]}: give one of them, or the "
                "attention_mask of the embeddings"
            )
    prompt = ids if embeds is None else embeds
    if mask is not None and prompt is None:
        raise Refused("attention_mask was given without a prompt: give the input_ids or inputs_embeds that it masks")
    if mask is not None and prompt is not None:
        _check_mask("attention_mask", mask, prompt.shape[:2])
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise Refused("attention_mask has numbers besides 0 and 1: give 1 for tokens and 0 for padding")


def prompt_ids(inputs: Any, kwargs: Mapping[str, Any]) -> Any:
    """The token ids that `generate` was given, under any of their names; None where there are none."""
    return next((g for g in (inputs, kwargs.get("input_ids"), kwargs.get("inputs")) if g is not None), None)


def _check_ids(name: str, ids: Any, vocabulary: int, needed: bool = True) -> None:
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not len(ids):
        raise Refused(f"{name} is {_form(ids)}: give token ids, a tensor of integers of (rows, tokens)")
    if needed and not ids.numel():
        raise Refused(f"{name} is empty: give each row at least one token")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise Refused(f"{name} has tokens outside the model's vocabulary of {vocabulary}")


def _check_embeds(embeds: Any, width: int) -> None:
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or not embeds.is_floating_point():
        raise Refused(f"inputs_embeds is {_form(embeds)}: give floats of (rows, tokens, {width})")
    if embeds.shape[2] != width:
        raise Refused(f"inputs_embeds is {embeds.shape[2]} wide, the embeddings of the model are {width}")


def _check_mask(name: str, mask: Any, form: Sequence[int]) -> None:
    if not isinstance(mask, Tensor) or mask.shape != form:
        raise Refused(f"{name} is {_form(mask)}: give one number for each token, {tuple(form)}")


def _form(value: Any) -> str:
    """Dtype and shape of a value, or its type, for messages."""
    return f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def text_prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any], window: int | None, pads: bool) -> list[Prompt]:
    """Each row's prompt without its padding.

    Args:
        model_kwargs: the other model inputs that `generate` passes to a decode loop.
        window: of a model with sliding windows, which count masked positions too.
        pads: whether padding does not change the model's text.

    Raises:
        Refused: a row is padded on the right, or empty; or an input is not supported.
    """
    _check_foreign(model_kwargs)
    embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
    source = input_ids if embeds is None else embeds
    if source.shape[1] == 0:
        raise Refused("the prompt is empty: give each row at least one token")
    if mask is not None and not bool((some := mask.any(-1)).all()):
        row = int(some.int().argmin())
        raise Refused(
            f"the prompt of row {row} is empty, its attention_mask has zeros alone: give it at least one token"
        )
    lines: list[Tensor] = list(source)
    if mask is not None:
        if not bool(mask[:, -1].all()):
            raise Refused("attention_mask ends in 0: pad on the left (tokenizer.padding_side = 'left')")
        if not pads and not bool(mask.all()):
            raise Refused(
                "attention_mask has zeros, and padding changes this model's text: give prompts of one length, or each "
                "in a call of its own"
            )
        if window is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise Refused(
                "attention_mask has gaps, which this model's sliding windows count: mask only padding on the left"
            )
        lines = [line[seen.bool()] for line, seen in zip(source, mask, strict=True)]
    return [Prompt(ids=line) if embeds is None else Prompt(embeds=line) for line in lines]


def source_prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any], sources: Tensor | None) -> list[Prompt]:
    """Prompts of an encoder-decoder: the decoder's prompt, and the encoder's output for the source.

    Args:
        model_kwargs: the other model inputs that `generate` passes to a decode loop.
        sources: (batch, length) token ids, with padding; rows / batch consecutive rows share a source.

    Raises:
        Refused: a prompt is padded, or a source is empty, or an input is not supported.
    """
    _check_foreign(model_kwargs)
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask.all())):
        raise Refused("decoder_attention_mask has gaps: give decoder_input_ids of one length, without padding")
    encoded = model_kwargs["encoder_outputs"]
    states, source_mask = encoded.last_hidden_state, getattr(encoded, "attention_mask", None)
    if source_mask is None:
        source_mask = model_kwargs.get("attention_mask")
    if source_mask is None:
        source_mask = states.new_ones(states.shape[:2])
    if source_mask.shape != states.shape[:2]:
        raise Refused(f"attention_mask is for {source_mask.shape[1]} positions, the source has {states.shape[1]}")
    source_mask = (source_mask != 0).long()
    if not bool(source_mask.any(-1).all()):
        raise Refused("a source is empty (masked throughout): give each row at least one token")
    texts: list[tuple[int, ...]] = [()] * len(source_mask)
    if sources is not None and sources.shape[1] == source_mask.shape[1]:
        lines = sources.repeat_interleave(len(source_mask) // len(sources), 0)
        texts = [tuple(line[mask.bool()].tolist()) for line, mask in zip(lines, source_mask, strict=True)]
    given = zip(input_ids, states, source_mask, texts, strict=True)
    return [Prompt(ids=ids, states=s, source_mask=h, source=text) for ids, s, h, text in given]


def _check_foreign(model_kwargs: Mapping[str, Any]) -> None:
    foreign = sorted(k for k, v in model_kwargs.items() if v is not None and v != {} and k not in INPUTS)
    if foreign:
        raise Refused(f"{', '.join(foreign)}: model inputs besides input_ids or inputs_embeds are not supported")


def states_of(encoded: Any) -> Any:
    """The states in an encoder's output: the attribute, or the first element of a tuple or list."""
    if isinstance(encoded, tuple | list):
        return next(iter(encoded), None)
    return getattr(encoded, "last_hidden_state", None)
