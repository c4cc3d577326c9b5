"""Sizes and weights of a model's modules, by whatever names it has them."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ATTENTION, FEED_FORWARD = re.compile("attn|attention"), re.compile("mlp|feed_?forward|ffn|moe")  # names of modules


def head_of(attention: Any) -> int:
    """Head size of an attention module.

    Raises:
        AttributeError: it has none, as a class whose modules were changed.
    """
    for name in ("head_dim", "head_size", "key_value_proj_dim"):
        if size := getattr(attention, name, None):
            return int(size)
    raise AttributeError(f"{type(attention).__name__} has no head_dim")


def head_norms(attention: Any) -> tuple[Any, Any]:
    """The norms over each head of the queries and of the keys; None where it has no keys of its own."""
    for names in (("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"), ("qk_norm", "qk_norm")):
        if hasattr(attention, names[0]):
            return getattr(attention, names[0]), getattr(attention, names[1])
    return attention.q_norm, getattr(attention, "k_norm", None)


def weight_of(norm: Any, width: int) -> Tensor:
    """The weight of a norm, ones where it has none."""
    weight: Tensor | None = getattr(norm, "weight", None)
    return torch.ones(width) if weight is None else weight


def kv_heads(config: Any) -> int:
    """Number of key-value heads of a configuration."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def inner_size(config: Any) -> int:
    """Numbers inside of a feed-forward, at most."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return size if isinstance(size, int) else max(size)


def outputs_of(layer: Any) -> int:
    """Number of outputs of a linear layer."""
    return layer.nf if type(layer) is Conv1D else layer.out_features


def inputs_of(layer: Any) -> int:
    """Number of inputs of a linear layer."""
    return layer.nx if type(layer) is Conv1D else layer.in_features


def feed_forward_linears(layer: nn.Module) -> list[nn.Module]:
    """The linear layers of a decoder layer outside its attention."""
    parts = [part for name, part in layer.named_children() if not ATTENTION.search(name)]
    return [module for part in parts for module in part.modules() if isinstance(module, nn.Linear | Conv1D)]


def eps_of(norm: Any) -> float:
    """What a norm adds to the mean of the squares."""
    return getattr(norm, "variance_epsilon", None) or norm.eps


def source_width(model: Any) -> int:
    """Width of the encoder's output of an encoder-decoder."""
    return getattr(model.get_encoder(), "config", model.config).get_text_config().hidden_size
