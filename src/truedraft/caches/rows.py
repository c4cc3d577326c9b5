"""A KV cache for rows of different lengths, without padding or realignment.

Slots 0..n-1 are in use. A pass writes each row's tree behind the row's own length; a commit keeps the accepted
path there, and the entries beyond the new length are ignored. Rows whose prompts are read in pieces have other slots
until they are activated.

On the CPU a slot takes memory as its row grows, and gives it back when the row leaves (`caches/pages.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import add, sub
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from truedraft.caches import pages
from truedraft.caches.entries import Entries
from truedraft.tree import DraftTree


class CacheCursor:
    """Where the current pass reads and writes; shared by all layers.

    lengths: committed positions per slot in use.
    reading: slot -> committed positions of a row whose prompt is being read; none of these slots is in use.
    offsets: what the positions of nodes exceed their places by, per slot in use; empty where every entry is at the
        place of its position (else `caches/subset.py`).
    chosen: committed positions of each of these rows when its entries were chosen, 0 where they never were.
    scratch: positions per slot in use that passes under views have kept behind these; empty where there are none.
    partial: layers that have not written all of the scratch.
    begun: committed positions per slot in use when `generated` was first asked for it.
    first, last: the slots that take part in the pass.
    width: positions that the pass writes per slot.
    extent: positions of a row that the pass may read: the longest row's length plus the width.
    level: whether all rows of the pass have one length; if not, `row` and `place` index the entries that it writes.
    row, place: (rows, 1) and (rows, width) indices into slots and positions.
    """

    row: Tensor
    place: Tensor

    def __init__(self, slots: int, capacity: int):
        self.slots, self.capacity = slots, capacity
        self.lengths: list[int] = []
        self.reading: dict[int, int] = {}
        self.offsets: list[int] = []
        self.chosen: list[int] = []
        self.scratch: list[int] = []
        self.partial: frozenset[int] = frozenset()
        self.begun: list[int] = []
        self.first = self.last = self.width = self.extent = 0
        self.level = True

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return list(map(add, self.lengths, self.offsets)) if self.offsets else self.lengths

    @property
    def taken(self) -> list[int]:
        """Places of each row that are taken, by scratch too."""
        return list(map(add, self.lengths, self.scratch)) if self.scratch else self.lengths

    @contextmanager
    def behind_scratch(self) -> Iterator[None]:
        """Within the block, passes read the scratch too and write behind it; afterwards the lengths are restored."""
        committed = list(self.lengths)
        try:
            self.lengths[:] = self.taken
            yield
        finally:
            self.lengths[:] = committed

    @contextmanager
    def reaching(self, slot: int) -> Iterator[None]:
        """Within the block, all slots before this one count as in use; afterwards the lengths are restored."""
        committed = list(self.lengths)
        try:
            self.lengths += [0] * (slot - len(committed))
            yield
        finally:
            self.lengths[:] = committed

    def use(self, rows: int) -> None:
        """Take slots into use, up to so many, without entries: of a cache whose entries have offsets."""
        for per_slot in (self.lengths, self.offsets, self.chosen):
            per_slot += [0] * (rows - len(per_slot))

    def generated(self) -> list[int]:
        """Positions per slot in use that were committed since this was first asked for it."""
        self.begun += self.positions[len(self.begun) :]
        return list(map(sub, self.positions, self.begun))

    def warm(self, trees: Sequence[DraftTree], first: int) -> list[list[bool]]:
        """By slot, which nodes of a tree behind it are among the first tokens that the row generates; empty where
        `first`, the number of these, is 0."""
        depths = zip(self.generated(), (tree.shape.depth for tree in trees), strict=True) if first else ()
        return [[behind + depth < first for depth in below] for behind, below in depths]

    def released(self, slot: int) -> None:
        """The last slot in use is about to move into this one."""
        if len(self.begun) == len(self.lengths):
            self.begun[slot] = self.begun[-1]
            self.begun.pop()

    def committed(self, slot: int) -> int:
        """Committed positions of a slot."""
        return self.lengths[slot] if slot < len(self.lengths) else self.reading[slot]

    def begin(self, first: int, last: int, width: int, device: torch.device) -> None:
        lengths = self.lengths[first:last]
        self.first, self.last, self.width = first, last, width
        self.extent = max(lengths) + width
        self.level = min(lengths) == max(lengths)
        if not self.level:
            self._scatter(torch.tensor(lengths, device=device)[:, None] + torch.arange(width, device=device))

    def placed(self, place: Tensor, extent: int, first: int = 0) -> None:
        """A pass over the slots from `first` on, which writes at `place`, (rows, width), and reads `extent` places."""
        self.first, self.last, self.width = first, first + len(place), place.shape[1]
        self.extent, self.level = extent, False
        self._scatter(place)

    def _scatter(self, place: Tensor) -> None:
        self.place, self.row = place, torch.arange(len(place), device=place.device)[:, None]


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values by slot; the cursor selects what a pass reads and writes."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(self, cursor: CacheCursor):
        super().__init__()
        self.cursor = cursor


class RowLayer(SlotLayer):
    """One layer's keys and values, (slots, heads, capacity, head size), allocated at the first write."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # zeros, not empty: positions behind a row are masked, and a masked NaN is still a NaN
        c, self._pages = self.cursor, list[pages.Pages]()
        self.keys, self.values = (
            self._zeros((c.slots, s.shape[1], c.capacity, s.shape[3]), s) for s in (key_states, value_states)
        )
        self.is_initialized = True

    def _zeros(self, sizes: tuple[int, ...], like: Tensor) -> Tensor:
        if not (like.is_cpu and pages.available()):
            return torch.zeros(*sizes, dtype=like.dtype, device=like.device)
        self._pages.append(pages.Pages(sizes, like.dtype))
        return self._pages[-1].tensor

    def allocate(
        self, heads: int, size: int, dtype: torch.dtype, device: torch.device, values: int | None = None
    ) -> None:
        """Allocate keys and values of given sizes, before anything is written; values: their size, if another."""
        sizes = (size, size if values is None else values)
        self.lazy_initialization(*(torch.empty(1, heads, 1, s, dtype=dtype, device=device) for s in sizes))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        c = self.cursor
        keys, values = self.keys[c.first : c.last], self.values[c.first : c.last]
        if c.level:
            start = c.lengths[c.first]
            keys[:, :, start : start + c.width] = key_states
            values[:, :, start : start + c.width] = value_states
        else:
            keys[c.row, :, c.place] = key_states.transpose(1, 2)
            values[c.row, :, c.place] = value_states.transpose(1, 2)
        return keys[:, :, : c.extent], values[:, :, : c.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cursor.extent, 0

    def get_seq_length(self) -> int:
        c = self.cursor
        return max(c.lengths[c.first : c.last], default=0)

    def get_max_length(self) -> int:
        return self.cursor.capacity

    @property
    def kept(self) -> list[Tensor]:
        """All that it keeps of a position."""
        return [self.keys, self.values]

    def move(self, source: int, target: int, length: int) -> None:
        self.keys[target, :, :length] = self.keys[source, :, :length]
        self.values[target, :, :length] = self.values[source, :, :length]

    def give_back(self, slot: int, length: int) -> None:
        """Give back the memory of the entries of a slot behind its first `length` positions, which need not be kept."""
        for own in self._pages:
            _, heads, capacity, size = own.tensor.shape
            first = slot * heads
            for head in range(first, first + heads) if length else (first,):
                end = head + 1 if length else first + heads
                own.give_back((head * capacity + length) * size, end * capacity * size)

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for kept in (self.keys, self.values):
            kept[[one, other], :, :length] = kept[[other, one], :, :length]


class IndexedLayer(RowLayer):
    """The same with keys of an indexer, which chooses the positions that a token attends to."""

    def __init__(self, cursor: CacheCursor):
        super().__init__(cursor)
        self.indexer = RowLayer(cursor)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer's keys of the pass, (rows, width, size); returns all of its rows, (rows, extent, size)."""
        keys = indexer_key_states[:, None]
        return self.indexer.update(keys, keys[..., :0])[0][:, 0]

    @property
    def kept(self) -> list[Tensor]:
        return super().kept + (self.indexer.kept if self.indexer.is_initialized else [])


class RowCache(Cache):
    """The layers of `RowLayer` under one cursor.

    Args:
        layers: number of attention layers.
        slots: rows at most.
        capacity: positions per row, the widest tree included.
    """

    layers: list[RowLayer]  # type: ignore[assignment]

    def __init__(self, layers: int, slots: int, capacity: int):
        self.cursor = CacheCursor(slots, capacity)
        self._entries: dict[frozenset[int], Entries] = {}  # of all layers but those skipped
        self.subsets: dict[Hashable, Any] = {}  # `SubsetCache`, for passes over a part of its entries
        self.rounded: dict[Hashable, Any] = {}  # copies of its entries in fewer bits
        Cache.__init__(self, layers=[RowLayer(self.cursor) for _ in range(layers)])

    @property
    def lengths(self) -> list[int]:
        return self.cursor.lengths

    @property
    def attention(self) -> list[RowLayer]:
        """The layers with keys and values."""
        return self.layers

    def clear(self) -> None:
        """Free every slot and zero the cache: positions behind a row are masked, but a masked NaN is still a NaN."""
        self.lengths.clear()
        self.cursor.begun.clear()
        self.cursor.reading.clear()
        self.rewind()
        self.subsets.clear()
        self.rounded.clear()
        for layer in self.attention:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Append the entries of `path`, offsets from the slot's length, to the row. Scratch is dropped."""
        self.rewind()
        self._gather(slot, self.lengths[slot], path)
        self.lengths[slot] += len(path)

    def advance(self, slot: int, path: Sequence[int], skipped: frozenset[int]) -> None:
        """Append the entries of `path`, offsets from the end of the slot's scratch, to its scratch.

        skipped: layers that the view does not run; they have no such entries.
        """
        cursor = self.cursor
        cursor.scratch = cursor.scratch or [0] * len(cursor.lengths)
        self._gather(slot, cursor.lengths[slot] + cursor.scratch[slot], path, skipped)
        cursor.scratch[slot] += len(path)
        if path:
            cursor.partial |= skipped

    def rewind(self) -> None:
        """Drop all scratch."""
        self.cursor.scratch.clear()
        self.cursor.partial = frozenset()
        for subset in self.subsets.values():
            subset.rewind()

    def shorten(self, slot: int, length: int) -> None:
        """Discard the entries of a slot beyond its first `length`. Scratch is dropped."""
        self.rewind()
        self.lengths[slot] = length
        for copies in (*self.subsets.values(), *self.rounded.values()):
            copies.shorten(slot, length)

    @contextmanager
    def set_back(self, slot: int, count: int) -> Iterator[None]:
        """Within the block, passes read and write behind a slot without its last `count` entries; afterwards it has
        them again, bit for bit. Scratch is dropped."""
        length = self.lengths[slot]
        entries = self.copied(slot, length - count, length)
        try:
            self.rewind()
            self.lengths[slot] = length - count
            yield
        finally:
            self.rewind()
            self.lengths[slot] = length
            self.paste(slot, length - count, entries)

    def _gather(self, slot: int, first: int, path: Sequence[int], skipped: frozenset[int] = frozenset()) -> None:
        """Move the entries of `path`, offsets from `first`, to positions from `first` on, except in skipped layers."""
        stay = next((i for i, node in enumerate(path) if node != i), len(path))
        if stay == len(path):
            return
        if (entries := self._entries.get(skipped)) is None:
            layers = [layer for i, layer in enumerate(self.layers) if i not in skipped]
            entries = self._entries[skipped] = Entries([one for layer in layers for one in layer.kept])
        entries.move(slot, first + stay, [first + node for node in path[stay:]])

    def release(self, slot: int) -> None:
        """Free a slot; the last slot in use is moved into it. Scratch is dropped."""
        self.rewind()
        for subset in self.subsets.values():
            subset.cursor.use(len(self.lengths))
            subset.release(slot)
        for rounded in self.rounded.values():
            rounded.release(slot, len(self.lengths))
        self.cursor.released(slot)
        last = len(self.lengths) - 1
        if slot != last:
            self._move_entries(last, slot, self.lengths[last])
            self.lengths[slot] = self.lengths[last]
        else:
            self._give_back(slot)
        self.lengths.pop()

    def _move_entries(self, source: int, target: int, length: int) -> None:
        """Move the first positions of a slot to another one, and give back what neither needs; layer by layer, so that
        little is held twice."""
        for layer in self.attention:
            if layer.is_initialized:
                layer.move(source, target, length)
                layer.give_back(target, length)
                layer.give_back(source, 0)

    def _give_back(self, slot: int) -> None:
        """Give back the memory of a slot."""
        for layer in self.attention:
            if layer.is_initialized:
                layer.give_back(slot, 0)

    def open(self) -> int:
        """Take a free slot for a row whose prompt will be read in pieces: the first, where it can remain."""
        reading = self.cursor.reading
        slot = next(slot for slot in range(len(self.lengths), self.cursor.slots) if slot not in reading)
        reading[slot] = 0
        return slot

    def activate(self, slot: int) -> int:
        """Put a row that has been read into use, behind those that are, and return its new slot. If another row is
        being read there, that one moves to `slot`. Entries of last tokens, which are not committed yet, move along.
        Scratch is dropped."""
        self.rewind()
        reading, new = self.cursor.reading, len(self.lengths)
        length = reading.pop(slot)
        if slot != new and (other := reading.pop(new, None)) is not None:
            for layer in self.attention:
                layer.swap(slot, new, max(length, other) + 1)
            reading[slot] = other
        elif slot != new:
            self._move_entries(slot, new, length + 1)
        self.lengths.append(length)
        return new

    def discard(self, slot: int) -> None:
        """Free the slot of a row whose prompt is being read."""
        del self.cursor.reading[slot]
        self._give_back(slot)

    def copied(self, slot: int, first: int, last: int) -> list[Tensor]:
        """Copies of the entries at positions `first` to `last` of a slot: keys and values of each layer, (heads,
        positions, head size)."""
        return [kept[slot, :, first:last].clone() for kept in self._kept]

    def paste(self, slot: int, first: int, entries: Sequence[Tensor]) -> None:
        """Write entries as `copied` returns them at the positions of a slot from `first` on."""
        for kept, new in zip(self._kept, entries, strict=True):
            kept[slot, :, first : first + new.shape[1]] = new

    @property
    def bytes_per_position(self) -> int:
        """Bytes of the keys and values of one position in all layers."""
        return sum(kept.shape[1] * kept.shape[3] * kept.element_size() for kept in self._kept)

    @property
    def _kept(self) -> list[Tensor]:
        return [kept for layer in self.attention if layer.is_initialized for kept in (layer.keys, layer.values)]


class IndexedCache(RowCache):
    """A `RowCache` of which all layers may have indexers."""

    def __init__(self, layers: int, slots: int, capacity: int):
        super().__init__(0, slots, capacity)
        self._indexed = [IndexedLayer(self.cursor) for _ in range(layers)]
        self.layers = list(self._indexed)

    @property
    def attention(self) -> list[RowLayer]:
        return self.layers + [layer.indexer for layer in self._indexed if layer.indexer.is_initialized]
