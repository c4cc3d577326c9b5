"""The decoder layer of learned heads, as in Llama and Qwen 3, with the caller's attention over keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# Attention over the cache: queries (rows, heads, width, head size) with keys and values (rows, KV heads, width, head
# size) of the same positions, to (rows, heads, width, head size).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotary = tuple[Tensor, Tensor]  # cosines and sines, (rows or 1, width, head size) each


def rotary_of(config: PreTrainedConfig) -> LlamaRotaryEmbedding:
    """The rotary embedding of a configuration, its scaling included: (like, positions) to cosines and sines."""
    return LlamaRotaryEmbedding(config)  # type: ignore[arg-type]


def layer_config(**fields: Any) -> LlamaConfig:
    """A configuration of decoder layers from the fields of a checkpoint's config.json; others are ignored.

    With `output_bias` False, `attention_bias` does not hold for the output of attention.
    """
    return LlamaConfig(**{"output_bias": True, **fields})


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary position embedding, halves of a head rotated together; x is (rows, heads, width, head size)."""
    cos, sin = (part[:, None] for part in rotary)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight: under autocast its inputs may be results of products in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class HeadAttention(nn.Module):
    """Attention of a head's layer; its inputs may be wider than the hidden size.

    Args:
        config: of the layers.
        width: of the inputs.
        norms: whether queries and keys are normalised per head, as in Qwen 3.
    """

    def __init__(self, config: Any, width: int, norms: bool = False):
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias and config.output_bias)
        if norms:
            self.q_norm, self.k_norm = (Norm(self.head_dim, config.rms_norm_eps) for _ in range(2))
        self.norms = norms

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """(rows, width, input width) to (rows, width, hidden size)."""
        query = self._by_head(self.q_proj, x)
        query = rotated(self.q_norm(query) if self.norms else query, rotary)
        found = attend(query, *self.keys_values(x, rotary))
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values of (rows, width, input width), (rows, KV heads, width, head size) each."""
        key, value = self._by_head(self.k_proj, x), self._by_head(self.v_proj, x)
        return rotated(self.k_norm(key) if self.norms else key, rotary), value

    def _by_head(self, part: nn.Linear, x: Tensor) -> Tensor:
        return part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class HeadMlp(nn.Module):
    """The gated feed-forward of a head's layer."""

    def __init__(self, config: Any):
        super().__init__()
        bias = bool(config.mlp_bias)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """Attention and feed-forward of a head, added to the residual stream.

    Args:
        config: of the layers.
        width: of the attention's inputs; by default the hidden size.
        norms: see `HeadAttention`.
        normed: whether the attention's inputs are normalised here.
    """

    def __init__(self, config: Any, width: int | None = None, norms: bool = False, normed: bool = True):
        super().__init__()
        self.self_attn = HeadAttention(config, width or config.hidden_size, norms)
        self.mlp = HeadMlp(config)
        if normed:
            self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.normed = normed

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend, given: Tensor | None = None) -> Tensor:
        """(rows, width, H) to (rows, width, H).

        given: what attention reads instead of the (normalised) residual stream.
        """
        if given is None:
            given = self.input_layernorm(x) if self.normed else x
        x = x + self.self_attn(given, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
