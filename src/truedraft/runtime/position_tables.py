"""Tables of what depends on positions: cosines and sines, from a model's own modules; factors and biases."""

from __future__ import annotations

from collections.abc import Callable
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


class PositionTables:
    """What functions make of every position, (..., positions), fp32; made again where it is too short."""

    def __init__(self) -> None:
        self._made: dict[Callable[[Tensor], Tensor], Tensor] = {}

    def __call__(self, make: Callable[[Tensor], Tensor], capacity: int) -> Tensor:
        if make not in self._made or self._made[make].shape[-1] < capacity:
            self._made[make] = make(torch.arange(capacity)).float().contiguous()
        return self._made[make]
