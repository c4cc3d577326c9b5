"""A part of the committed entries of another cache's rows, side by side, so that a pass over them reads little memory.

Keys contain their positions, so that attention does not depend on the order of entries. The first `first` places of a
row hold its first positions, and the rest is a ring of the most recent ones: a commit costs as many copies as it has
positions.
"""

from __future__ import annotations

import torch

from truedraft.caches.rows import RowCache


class SubsetCache(RowCache):
    """Entries of the rows of another cache, the whole one, in the same slots. See `RowCache`.

    Args:
        whole: its layers have keys and values already.
        first: positions at the beginning of a row that are kept.
        recent: positions at its end, one or more.
        capacity: places of a row, for these and for scratch.
        before: the same with fewer places, whose rows it takes over.
    """

    def __init__(self, whole: RowCache, first: int, recent: int, capacity: int, before: SubsetCache | None = None):
        self.first, self.recent = first, recent
        super().__init__(len(whole.layers), whole.cursor.slots, capacity)
        for layer, of in zip(self.layers, whole.layers, strict=True):
            if of.is_initialized:
                layer.lazy_initialization(of.keys[:1], of.values[:1])
        if before is not None:
            self.cursor.__dict__ |= before.cursor.__dict__ | {"capacity": capacity}
            for new, old in zip(self._kept, before._kept, strict=True):
                new[:, :, : old.shape[2]] = old

    def follow(self, whole: RowCache, slot: int) -> None:
        """Copy what was committed to a slot since it was followed last."""
        before, now = self.cursor.positions[slot], whole.lengths[slot]
        if now == before:
            return
        if before < self.first:
            self._copy(whole, slot, before, min(now, self.first), before)
        at = max(before, self.first, now - self.recent)
        while at < now:
            place = self.first + (at - self.first) % self.recent
            end = min(now, at + self.first + self.recent - place)
            self._copy(whole, slot, at, end, place)
            at = end
        self.lengths[slot] = min(now, self.first + self.recent)
        self.cursor.offsets[slot] = now - self.lengths[slot]

    def _copy(self, whole: RowCache, slot: int, first: int, last: int, place: int) -> None:
        """Copy the entries at positions `first` to `last`, to the places from `place` on."""
        size = last - first
        torch._foreach_copy_(
            [kept[slot, :, place : place + size] for kept in self._kept],
            [kept[slot, :, first:last] for kept in whole._kept],
        )

    def release(self, slot: int) -> None:
        super().release(slot)
        last = self.cursor.offsets.pop()
        if slot < len(self.lengths):
            self.cursor.offsets[slot] = last

    def shorten(self, slot: int, length: int) -> None:
        """Forget the row, since entries that were overwritten in the ring may be recent again."""
        self.rewind()
        self.cursor.use(slot + 1)
        self.lengths[slot] = self.cursor.offsets[slot] = 0
