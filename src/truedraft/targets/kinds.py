"""The kind of a model by its configuration of `transformers`, before a target is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Family = Literal["decoder", "encoder-decoder"]


def reads_sources(config: Any) -> bool:
    """Whether models with such a configuration have an encoder, which reads a source per row."""
    return bool(config.is_encoder_decoder)


def family_of(config: Any) -> Family:
    """Their kind; cards name under it why a method cannot draft for such models."""
    return "encoder-decoder" if reads_sources(config) else "decoder"


def auto_class(config: Any) -> Any:
    """The class of `transformers` that loads generative models of this kind."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    if config.model_type == "diffusion_gemma":
        return AutoModelForImageTextToText
    return AutoModelForSeq2SeqLM if reads_sources(config) else AutoModelForCausalLM


def prompt_length(config: Any, input_ids: Tensor) -> int:
    """Tokens that `model.generate(input_ids)` returns before the first new one: the prompt with its padding, or the
    start token of an encoder-decoder's decoder."""
    return 1 if reads_sources(config) else input_ids.shape[1]
