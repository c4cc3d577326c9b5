"""Blocks that learned drafters are built of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

Keeping = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # keys and values of a pass -> all that are looked at


class Places(NamedTuple):
    """What positions are made into: (..., size) to be added, (..., 1, half a head) each by which queries are turned."""

    wave: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, size: int, heads: int, dtype: torch.dtype) -> Places:
        """Of (...) positions: sines and cosines of them at `size / 2` rates, the turns at those of one head."""
        half = size // 2
        rates = 1e4 ** -torch.linspace(0, 1, half, device=positions.device)
        angles = positions[..., None] * rates
        turns = angles[..., None, ::heads]
        made = torch.cat([angles.sin(), angles.cos()], -1), turns.cos(), turns.sin()
        return cls(*(part.to(dtype) for part in made))

    def at(self, index: Tensor) -> Places:
        return Places(self.wave[index], self.cos[index], self.sin[index])


def turned(x: Tensor, places: Places) -> Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864); x is (rows, width, heads, head size)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * places.cos - b * places.sin, b * places.cos + a * places.sin], -1)


class Listening(nn.Module):
    """A layer that looks at its own tokens, then at a source, then thinks; norms stand in front.

    Args:
        size: of the states, a multiple of twice the heads.
        heads: of both attentions.
        inner: of the feed-forward part.
        heard: size of the source's states.
    """

    def __init__(self, size: int, heads: int, inner: int, heard: int):
        super().__init__()
        self.heads = heads
        self.norm_own, self.norm_source, self.norm_inner = (nn.LayerNorm(size) for _ in range(3))
        self.own, self.own_out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.asked, self.source, self.source_out = (
            nn.Linear(size, size),
            nn.Linear(heard, 2 * size),
            nn.Linear(size, size),
        )
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)

    def heard(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, heads, length, head size) of sources, (rows, length, heard)."""
        keys, values = self._split(self.source(states)).chunk(2, 1)
        return keys, values

    def forward(
        self,
        x: Tensor,
        places: Places,
        keep: Keeping,
        mask: Tensor,
        source: tuple[Tensor, Tensor],
        hears: Tensor,
        first: int = 0,
    ) -> Tensor:
        """(rows, width, size) to (rows, width - first, size).

        keep: takes the keys and values of x, (rows, heads, width, head size).
        mask: (rows, 1, width, keys) where x looks at them.
        source, hears: see `heard`; (rows, 1, 1, length), false for its padding.
        first: so many at the front are looked at and go no further.
        """
        query, key, value = self.own(self.norm_own(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = turned(query, places).transpose(1, 2), turned(key, places).transpose(1, 2)
        kept = keep(key, value.transpose(1, 2))
        seen = scaled_dot_product_attention(query[:, :, first:], *kept, attn_mask=mask[:, :, first:])
        x = x[:, first:] + self.own_out(_joined(seen))
        found = scaled_dot_product_attention(self._split(self.asked(self.norm_source(x))), *source, attn_mask=hears)
        x = x + self.source_out(_joined(found))
        return x + self.down(gelu(self.up(self.norm_inner(x))))

    def _split(self, x: Tensor) -> Tensor:
        """(rows, width, n size) to (rows, n heads, width, head size)."""
        return x.unflatten(-1, (-1, self.norm_own.normalized_shape[0] // self.heads)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
