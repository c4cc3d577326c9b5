"""Blocks that learned drafters are built of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

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


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention by its parts: for a few queries they take less time than torch's own, and backwards too, on a CPU.

    mask: what is added to the scores, see `masking`.
    """
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    return scores.add(mask).softmax(-1).to(value.dtype) @ value


def masking(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where something is seen and minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


class CrossAttentionLayer(nn.Module):
    """A layer that looks at its own tokens, then at a source, then thinks; norms stand in front.

    Args:
        size: of the states, a multiple of twice the heads.
        heads: of both attentions.
        inner: of the feed-forward part.
        heard: size of the source's states.
        dropout: of what each part adds, while it learns.
    """

    def __init__(self, size: int, heads: int, inner: int, heard: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
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
        mask: (rows, 1, width, keys), see `masking`: where x looks at them.
        source, hears: see `heard`; (rows, 1, 1, length), the same for the source and its padding.
        first: so many at the front are looked at and go no further.
        """
        query, key, value = self.own(self.norm_own(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key = turned(query, places).transpose(1, 2), turned(key, places).transpose(1, 2)
        kept = keep(key, value.transpose(1, 2))
        seen = attended(query[:, :, first:], *kept, mask[:, :, first:])
        x = x[:, first:] + self.drop(self.own_out(_joined(seen)))
        found = attended(self._split(self.asked(self.norm_source(x))), *source, hears)
        x = x + self.drop(self.source_out(_joined(found)))
        return x + self.drop(self.down(gelu(self.up(self.norm_inner(x)))))

    def _split(self, x: Tensor) -> Tensor:
        """(rows, width, n size) to (rows, n heads, width, head size)."""
        return x.unflatten(-1, (-1, self.norm_own.normalized_shape[0] // self.heads)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
