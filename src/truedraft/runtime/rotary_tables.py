"""Tables of rotary embeddings: cosines and sines of every position, from a model's own modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RotaryTables:
    """The tables of each rotary embedding and kind of layer asked for, made again where they are too short."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def __call__(self, rotary: Any, kind: str, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of at least `capacity` positions, fp32, (positions, rotary); in a model of `dtype`."""
        key = id(rotary), kind
        if key not in self._made or len(self._made[key][0]) < capacity:
            by_kind = (kind,) if hasattr(rotary, "layer_types") else ()
            cos, sin = rotary(torch.empty(1, dtype=dtype), torch.arange(capacity)[None], *by_kind)
            self._made[key] = cos[0].float().contiguous(), sin[0].float().contiguous()
        return self._made[key]
