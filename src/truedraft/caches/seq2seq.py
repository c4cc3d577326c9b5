"""The cache of an encoder-decoder: the decoder's rows, and the keys and values of their sources, computed once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, EncoderDecoderCache

from truedraft.caches.rows import CacheCursor, RowCache, SlotLayer


class SourceLayer(SlotLayer):
    """One layer's keys and values of the sources, (slots, heads, width, head size); never cropped.

    width: positions of the longest source.
    keys, values: those of the rows of the current pass.
    """

    width = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._all = tuple(
            s.new_zeros(self.cursor.slots, s.shape[1], self.width, s.shape[3]) for s in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.show()
        self.keys.copy_(key_states)
        self.values.copy_(value_states)
        return self.keys, self.values

    def put(self, slot: int, keys: Tensor, values: Tensor) -> None:
        """Write one row's, (heads, length, head size), at the front of its slot."""
        if not self.is_initialized:
            self.lazy_initialization(keys[None], values[None])
        for kept, new in zip(self._all, (keys, values), strict=True):
            kept[slot, :, : new.shape[1]] = new

    def widen(self, width: int) -> None:
        """Extend the width for longer sources, keeping the present ones."""
        if self.is_initialized:
            self._all = tuple(pad(kept, (0, 0, 0, width - self.width)) for kept in self._all)
        self.width = width

    def clear(self, width: int) -> None:
        """Discard all sources; the next ones have at most `width` positions."""
        self.width, self.is_initialized = width, False

    def show(self) -> None:
        """Set `keys` and `values` to those of the current pass's rows."""
        self.keys, self.values = (kept[self.cursor.first : self.cursor.last] for kept in self._all)

    @property
    def data_pointers(self) -> tuple[int, int]:
        """Memory addresses of all keys and of all values."""
        keys, values = self._all
        return keys.data_ptr(), values.data_ptr()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self.width if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.get_seq_length()

    def move(self, source: int, target: int) -> None:
        for kept in self._all:
            kept[target] = kept[source]


class Seq2SeqCache(EncoderDecoderCache):
    """A `RowCache` for the decoder, and the sources of its rows.

    states: (slots, width, H), the encoder's output; width is the length of the longest source.
    source_mask: (slots, width), 0 for padding.
    counts: by slot in use, the positions of its source that are not padding.

    Args:
        layers: of the decoder.
        slots: rows at most.
        capacity: positions per row of the decoder, the widest tree included.
    """

    states: Tensor
    source_mask: Tensor

    def __init__(self, layers: int, slots: int, capacity: int):
        self.rows = RowCache(layers, slots, capacity)
        self.counts: list[int] = []
        self.sources = [SourceLayer(self.rows.cursor) for _ in range(layers)]
        super().__init__(self.rows, Cache(layers=list(self.sources)))

    @property
    def cursor(self) -> CacheCursor:
        return self.rows.cursor

    @property
    def lengths(self) -> list[int]:
        return self.rows.lengths

    @property
    def bytes_per_position(self) -> int:
        """Bytes of the decoder's keys and values of one position in all layers."""
        return self.rows.bytes_per_position

    @property
    def width(self) -> int:
        """Positions of a source per slot; 0 where no slot is in use."""
        return self.source_mask.shape[1] if self.lengths else 0

    def begin(self, states: Tensor, source_mask: Tensor) -> None:
        """Add rows with encoder states (rows, source length, H) and masks (rows, source length); the next pass computes
        their keys and values. The width grows to the longest source.
        """
        (count, width), first = source_mask.shape, len(self.lengths)
        if first == 0:
            self.states = states.new_zeros(self.cursor.slots, *states.shape[1:])
            self.source_mask = source_mask.new_zeros(self.cursor.slots, width)
            for layer in self.sources:
                layer.clear(width)
        elif width > self.width:
            for layer in self.sources:
                layer.widen(width)
            self.states = pad(self.states, (0, 0, 0, width - self.width))
            self.source_mask = pad(self.source_mask, (0, width - self.width))
        for kept, new in ((self.states, states), (self.source_mask, source_mask)):
            kept[first : first + count] = 0  # of the row that had the slot before
            kept[first : first + count, :width] = new
        self.counts[first:] = source_mask.sum(1).tolist()
        self.is_updated = dict.fromkeys(range(len(self.sources)), False)

    def show(self) -> None:
        """Select the sources of the current pass's rows."""
        for layer in self.sources:
            layer.show()

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self.rows.commit(slot, path)

    def rewind(self) -> None:
        self.rows.rewind()

    def shorten(self, slot: int, length: int) -> None:
        self.rows.shorten(slot, length)

    def release(self, slot: int) -> None:
        """Free a slot; the last slot in use is moved into it."""
        last = len(self.lengths) - 1
        if slot != last:
            for layer in self.sources:
                layer.move(last, slot)
            self.states[slot], self.source_mask[slot] = self.states[last], self.source_mask[last]
            self.counts[slot] = self.counts[last]
        self.counts.pop()
        self.rows.release(slot)
