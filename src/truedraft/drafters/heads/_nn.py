"""Building blocks of learned drafters: position encodings, attention, a decoder layer with cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

CacheUpdate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys and values of a pass -> all that it attends to


class PositionEncoding(NamedTuple):
    """Encodings of positions.

    sinusoid: (..., size), added to embeddings. cos, sin: (..., 1, head size / 2), of the rotary angles.
    """

    sinusoid: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, size: int, heads: int, dtype: torch.dtype) -> PositionEncoding:
        """Encode (...) positions: sines and cosines at `size / 2` rates; rotary angles at every `heads`-th of them."""
        half = size // 2
        rates = 1e4 ** -torch.linspace(0, 1, half, device=positions.device)
        angles = positions[..., None] * rates
        rotary = angles[..., None, ::heads]
        parts = torch.cat([angles.sin(), angles.cos()], -1), rotary.cos(), rotary.sin()
        return cls(*(part.to(dtype) for part in parts))

    def at(self, index: Tensor) -> PositionEncoding:
        return PositionEncoding(self.sinusoid[index], self.cos[index], self.sin[index])


def apply_rotary(x: Tensor, places: PositionEncoding) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864); x is (rows, width, heads, head size)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * places.cos - b * places.sin, b * places.cos + a * places.sin], -1)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention written out: for a few queries on a CPU it is faster than torch's own, forward and backward.

    mask: added to the scores, see `attention_bias`.
    """
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    return scores.add(mask).softmax(-1).to(value.dtype) @ value


def attention_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, minus infinity elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


class CrossAttentionLayer(nn.Module):
    """A pre-norm decoder layer: self-attention, cross-attention to an encoder's output, feed-forward.

    Args:
        size: hidden size, a multiple of twice the heads.
        heads: of both attentions.
        inner: hidden size of the feed-forward.
        encoder_width: hidden size of the encoder.
        dropout: of what each part adds, in training.
    """

    def __init__(self, size: int, heads: int, inner: int, encoder_width: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm_own, self.norm_source, self.norm_inner = (nn.LayerNorm(size) for _ in range(3))
        self.own, self.own_out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.cross_query, self.source, self.source_out = (
            nn.Linear(size, size),
            nn.Linear(encoder_width, 2 * size),
            nn.Linear(size, size),
        )
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)

    def encoder_kv(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (rows, heads, length, head size) each, of encoder states, (rows, length, encoder_width)."""
        keys, values = self._split(self.source(states)).chunk(2, 1)
        return keys, values

    def forward(
        self,
        x: Tensor,
        places: PositionEncoding,
        update: CacheUpdate,
        mask: Tensor,
        source: tuple[Tensor, Tensor],
        source_bias: Tensor,
        first: int = 0,
    ) -> Tensor:
        """(rows, width, size) to (rows, width - first, size).

        update: stores the keys and values of x, (rows, heads, width, head size), and returns all to attend to.
        mask: (rows, 1, width, keys), see `attention_bias`.
        source, source_bias: keys and values of the source, see `encoder_kv`; (rows, 1, 1, length), masks its padding.
        first: leading positions that serve as keys and values only, without an output.
        """
        query, key, value = self.own(self.norm_own(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = apply_rotary(query, places).transpose(1, 2), apply_rotary(key, places).transpose(1, 2)
        cached = update(key, value.transpose(1, 2))
        own = attention(query[:, :, first:], *cached, mask[:, :, first:])
        x = x[:, first:] + self.drop(self.own_out(_joined(own)))
        crossed = attention(self._split(self.cross_query(self.norm_source(x))), *source, source_bias)
        x = x + self.drop(self.source_out(_joined(crossed)))
        return x + self.drop(self.down(gelu(self.up(self.norm_inner(x)))))

    def _split(self, x: Tensor) -> Tensor:
        """(rows, width, n size) to (rows, n heads, width, head size)."""
        return x.unflatten(-1, (-1, self.norm_own.normalized_shape[0] // self.heads)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
