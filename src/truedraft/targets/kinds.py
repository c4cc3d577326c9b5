"""What kind of model a configuration of `transformers` is of, where there is no target of it yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Family = Literal["decoder", "encoder-decoder"]


def reads_sources(config: Any) -> bool:
    """Whether models with such a configuration have an encoder, which reads a source per row."""
    return bool(config.is_encoder_decoder)


def family_of(config: Any) -> Family:
    """Their kind, the key under which cards say why a method cannot draft for it."""
    return "encoder-decoder" if reads_sources(config) else "decoder"


def auto_class(config: Any) -> Any:
    """The class of `transformers` that loads generative models of this kind."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if reads_sources(config) else AutoModelForCausalLM


def prompt_length(config: Any, input_ids: Tensor) -> int:
    """Tokens that `model.generate(input_ids)` returns before the first new one: the prompt with its padding, or the
    token that the decoder of an encoder-decoder begins with."""
    return 1 if reads_sources(config) else input_ids.shape[1]
