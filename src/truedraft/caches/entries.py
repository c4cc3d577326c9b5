"""Moves entries of cached keys and values: compiled on CPU, by torch elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.stores._native import library


class Entries:
    """The entries of tensors (slots, heads, positions, size), which stay where they are in memory.

    Args:
        kept: keys and values of layers.
    """

    def __init__(self, kept: Sequence[Tensor]):
        self._kept = [one for one in kept if one.numel()]
        self._compiled = library() if all(one.is_cpu and one.is_contiguous() for one in self._kept) else None
        self._layouts = array("q")
        for one in self._kept:
            slot, head, entry, _ = (stride * one.element_size() for stride in one.stride())
            self._layouts.extend((one.data_ptr(), slot, head, one.shape[1], entry))

    def move(self, slot: int, first: int, places: Sequence[int]) -> None:
        """Move a slot's entries at `places` to the positions from `first` on.

        places: ascending, and `places[i] >= first + i`.
        """
        if self._compiled is not None:
            at = array("q", places)
            self._compiled.truedraft_move(
                self._layouts.buffer_info()[0], len(self._kept), slot, first, at.buffer_info()[0], len(at)
            )
        elif self._kept:
            chosen = torch.tensor(places, device=self._kept[0].device)
            for one in self._kept:
                one[slot, :, first : first + len(places)] = one[slot].index_select(1, chosen)
