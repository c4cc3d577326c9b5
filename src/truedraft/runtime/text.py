"""The language model inside a model that also reads images or sounds."""

from __future__ import annotations

from typing import Any


class TextModel:
    """The text part of a model, with the attributes that a causal language model of `transformers` has.

    Attributes:
        whole: the model.
        config: of the language model alone.
        dtype: of the whole model.
    """

    def __init__(self, whole: Any):
        body = whole.get_decoder()
        if hasattr(body, "lm_head"):  # Llama 4's is a language model
            body = body.model
        self.whole, self.config = whole, whole.config.get_text_config(decoder=True)
        self.dtype = whole.dtype
        self.get_input_embeddings, self.get_output_embeddings = whole.get_input_embeddings, whole.get_output_embeddings
        vars(self)[body.base_model_prefix or "model"] = body


def text_of(model: Any) -> Any:
    """The text part of a model of several; a model that is a language model throughout is its own."""
    return model if model.config.get_text_config(decoder=True) is model.config else TextModel(model)
