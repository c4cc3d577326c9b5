"""The cache of an encoder-decoder: the decoder's rows, and for each what its source was made into, once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from truedraft.caches.rows import Cursor, RowCache, SlotLayer


class SourceLayer(SlotLayer):
    """One layer's keys and values of the sources, (slots, heads, source length, head size); never cropped.

    keys, values: of the rows that take part in the pass.
    """

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._all = tuple(s.new_zeros(self.cursor.slots, *s.shape[1:]) for s in (key_states, value_states))
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

    def show(self) -> None:
        """The rows of the pass under way."""
        self.keys, self.values = (kept[self.cursor.first : self.cursor.last] for kept in self._all)

    @property
    def addresses(self) -> tuple[int, int]:
        """Where all keys and values lie."""
        keys, values = self._all
        return keys.data_ptr(), values.data_ptr()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self._all[0].shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.get_seq_length()

    def move(self, source: int, target: int) -> None:
        for kept in self._all:
            kept[target] = kept[source]


class PairCache(EncoderDecoderCache):
    """`RowCache` for the decoder, and the sources beside it.

    states: (slots, source length, H), what the encoder says. heard: (slots, source length), 0 for padding.
    counts: by slot in use, the positions of its source that are not padding.

    Args:
        layers: of the decoder.
        slots: rows at most.
        capacity: positions per row of the decoder, the widest tree included.
    """

    states: Tensor
    heard: Tensor

    def __init__(self, layers: int, slots: int, capacity: int):
        self.rows = RowCache(layers, slots, capacity)
        self.counts: list[int] = []
        self.sources = [SourceLayer(self.rows.cursor) for _ in range(layers)]
        super().__init__(self.rows, Cache(layers=list(self.sources)))

    @property
    def cursor(self) -> Cursor:
        return self.rows.cursor

    @property
    def lengths(self) -> list[int]:
        return self.rows.lengths

    def begin(self, states: Tensor, heard: Tensor) -> None:
        """The next rows, (rows, source length, H) and (rows, source length): their keys are made by the next pass."""
        first, last = len(self.lengths), len(self.lengths) + len(states)
        if first == 0:
            self.states = states.new_zeros(self.cursor.slots, *states.shape[1:])
            self.heard = heard.new_zeros(self.cursor.slots, heard.shape[1])
        self.states[first:last], self.heard[first:last] = states, heard
        self.counts[first:] = heard.sum(1).tolist()
        self.is_updated = dict.fromkeys(range(len(self.sources)), False)

    def show(self) -> None:
        """The sources of the rows that take part in the pass under way."""
        for layer in self.sources:
            layer.show()

    def commit(self, slot: int, path: Sequence[int]) -> None:
        self.rows.commit(slot, path)

    def advance(self, slot: int, path: Sequence[int], skipped: frozenset[int]) -> None:
        self.rows.advance(slot, path, skipped)

    def rewind(self) -> None:
        self.rows.rewind()

    def release(self, slot: int) -> None:
        """Free a slot; the last one in use takes its place."""
        last = len(self.lengths) - 1
        if slot != last:
            for layer in self.sources:
                layer.move(last, slot)
            self.states[slot], self.heard[slot] = self.states[last], self.heard[last]
            self.counts[slot] = self.counts[last]
        self.counts.pop()
        self.rows.release(slot)
