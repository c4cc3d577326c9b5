"""The language model inside a model that also reads images or sounds."""

from __future__ import annotations

from typing import Any


def decoder_of(model: Any) -> Any:
    """The decoder of a model without its output head; what `get_decoder` gives of Llama 4 is a language model."""
    decoder = model.get_decoder()
    decoder = model.base_model if decoder is model else decoder
    return decoder.model if hasattr(decoder, "lm_head") and hasattr(decoder, "model") else decoder


class TextModel:
    """The text part of a model, with the attributes that a causal language model of `transformers` has.

    Attributes:
        whole: the model.
        config: of the language model alone.
        dtype: of the whole model.
    """

    def __init__(self, whole: Any):
        body = decoder_of(whole)
        self.whole, self.config = whole, whole.config.get_text_config(decoder=True)
        self.dtype = whole.dtype
        self.get_input_embeddings, self.get_output_embeddings = whole.get_input_embeddings, whole.get_output_embeddings
        vars(self)[body.base_model_prefix or "model"] = body


def text_of(model: Any) -> Any:
    """The text part of a model of several; a model that is a language model throughout is its own."""
    return model if model.config.get_text_config(decoder=True) is model.config else TextModel(model)
