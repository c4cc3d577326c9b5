"""Moves entries of cached keys and values: compiled on CPU, by torch elsewhere."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@cache
def compiled() -> Any:
    """The module of `_entries.c`, or None where it was not built; TRUEDRAFT_NATIVE=0 in the environment hides it."""
    if os.environ.get("TRUEDRAFT_NATIVE", "") == "0":
        return None
    try:
        return import_module("truedraft.caches._entries")
    except ImportError:
        return None


class Entries:
    """The entries of tensors (slots, heads, positions, size), which stay where they are in memory.

    Args:
        kept: keys and values of layers.
    """

    def __init__(self, kept: Sequence[Tensor]):
        self._kept = [one for one in kept if one.numel()]
        self._compiled = compiled() if all(one.is_cpu and one.is_contiguous() for one in self._kept) else None
        self._layouts = array("q")  # as in _entries.c
        for one in self._kept:
            slot, head, entry, _ = (stride * one.element_size() for stride in one.stride())
            self._layouts.extend((one.data_ptr(), slot, head, one.shape[1], entry))

    def move(self, slot: int, first: int, places: list[int]) -> None:
        """Move a slot's entries at `places` to the positions from `first` on.

        places: ascending, and `places[i] >= first + i`.
        """
        if self._compiled is not None:
            self._compiled.move(self._layouts, slot, first, places)
        elif self._kept:
            chosen = torch.tensor(places, device=self._kept[0].device)
            for one in self._kept:
                one[slot, :, first : first + len(places)] = one[slot].index_select(1, chosen)
