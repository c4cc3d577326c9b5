"""A part of the committed entries of another cache's rows, side by side, so that a pass over them reads little memory.

Keys contain their positions, so that attention does not depend on the order of entries. The first `kept` places of a
row hold its first positions, or others that were chosen, and the rest is a ring of the most recent ones: a commit costs
as many copies as it has positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.caches.rows import RowCache


class SubsetCache(RowCache):
    """Entries of the rows of another cache, the whole one, in the same slots. See `RowCache`.

    Args:
        whole: its layers have keys and values already.
        kept: positions of a row that are kept.
        recent: positions at its end, one or more.
        capacity: places of a row, for these and for scratch.
        before: the same with fewer places, whose rows it takes over.
    """

    def __init__(self, whole: RowCache, kept: int, recent: int, capacity: int, before: SubsetCache | None = None):
        self.kept, self.recent = kept, recent
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
        if before < self.kept:
            self._copy(whole, slot, before, min(now, self.kept), before)
        at = max(before, self.kept, now - self.recent)
        while at < now:
            place = self.kept + (at - self.kept) % self.recent
            end = min(now, at + self.kept + self.recent - place)
            self._copy(whole, slot, at, end, place)
            at = end
        self.lengths[slot] = min(now, self.kept + self.recent)
        self.cursor.offsets[slot] = now - self.lengths[slot]

    def return_nodes(self, whole: RowCache, sizes: Sequence[int]) -> None:
        """Copy what a pass has written behind the entries of each slot to where a pass over the whole row would have
        written it; sizes: nodes by slot."""
        for slot, size in enumerate(sizes):
            at, to = self.lengths[slot], whole.lengths[slot]
            torch._foreach_copy_(
                [kept[slot, :, to : to + size] for kept in whole._kept],
                [kept[slot, :, at : at + size] for kept in self._kept],
            )

    def _copy(self, whole: RowCache, slot: int, first: int, last: int, place: int) -> None:
        """Copy the entries at positions `first` to `last`, to the places from `place` on."""
        size = last - first
        torch._foreach_copy_(
            [kept[slot, :, place : place + size] for kept in self._kept],
            [kept[slot, :, first:last] for kept in whole._kept],
        )

    def due(self, whole: RowCache, slot: int, refresh: int) -> bool:
        """Whether entries are to be chosen in a slot: it has more positions than places, and they never were, or before
        `refresh` positions or more, if that is not 0."""
        now, before = whole.lengths[slot], self.cursor.chosen[slot]
        return now > self.kept + self.recent and (not before or 0 < refresh <= now - before)

    def choose(self, whole: RowCache, slot: int, queries: Sequence[Tensor], chunk: int) -> None:
        """Keep, instead of the first positions, those before the recent ones that queries attend to the most; the first
        chunk is always among them.

        Args:
            slot: has more positions than there are places.
            queries: (heads, queries per head, size) by layer, scaled.
            chunk: adjacent positions that are chosen together, by their mean key.
        """
        count, last = self.kept // chunk, whole.lengths[slot] - self.recent
        for own, layer, query in zip(self.layers, whole.layers, queries, strict=True):
            keys = layer.keys[slot, :, : last // chunk * chunk].float()
            scores = (query.float() @ keys.mT).unflatten(-1, (-1, chunk)).mean(-1)  # products with the mean keys
            weights = scores.softmax(-1).sum(1)
            weights[:, 0] = torch.inf
            chunks = weights.topk(count).indices.sort().values[..., None] * chunk
            positions = (chunks + torch.arange(chunk, device=chunks.device)).flatten(1)[..., None]
            for mine, theirs in zip(own.kept, layer.kept, strict=True):
                mine[slot, :, : self.kept] = theirs[slot].gather(1, positions.expand(-1, -1, theirs.shape[-1]))
        self.cursor.chosen[slot] = whole.lengths[slot]

    def release(self, slot: int) -> None:
        super().release(slot)
        for per_slot in (self.cursor.offsets, self.cursor.chosen):
            last = per_slot.pop()
            if slot < len(per_slot):
                per_slot[slot] = last

    def shorten(self, slot: int, length: int) -> None:
        """Forget the row, since entries that were overwritten in the ring may be recent again."""
        self.rewind()
        self.cursor.use(slot + 1)
        self.lengths[slot] = self.cursor.offsets[slot] = self.cursor.chosen[slot] = 0
