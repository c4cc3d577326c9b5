"""Which model it is, for what was fitted to one."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from transformers import PreTrainedModel

from truedraft.identity import Identity

SAMPLED = 64  # rows of the embedding table that are hashed


def identity_of(model: PreTrainedModel, tokens: str = "") -> Identity:
    """The identity of a model; tokens: the fingerprint of its tokenizer's vocabulary, where that is known."""
    config = model.config.get_text_config(decoder=True)
    sizes = config.vocab_size, config.hidden_size, config.num_hidden_layers
    return Identity(type(model).__name__, fingerprint(model), sizes, tokens)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of a model's class, sizes and those weights that quantising leaves alone, rounded to bf16."""
    config = model.config.get_text_config(decoder=True)
    table: Any = model.get_input_embeddings().weight
    sampled = [*(p for p in model.parameters() if p.ndim == 1), table[:: max(len(table) // SAMPLED, 1)]]
    digest = hashlib.sha256(f"{type(model).__name__} {config.vocab_size} {config.hidden_size}".encode())
    for weight in sampled:
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
