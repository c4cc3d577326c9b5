"""A KV cache for rows of models with states whose passes compute a state per node of a tree (`native/recurrent.inc`).

A slot keeps the states of its committed tokens, and what the nodes of its latest tree would bring to them. The path
that is committed is noted; the next pass begins by adding it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.caches.rows import RowCache

DRAFTS = 16  # nodes of a tree for which there is room at first


class DraftedStateCache(RowCache):
    """See the module; keys and values as in `RowCache`.

    states: (slots, ...) by operation that has them.
    drafted: (slots, drafts, numbers) by operation: what the nodes of the latest trees bring to the states.
    """

    def __init__(self, layers: int, slots: int, capacity: int):
        super().__init__(layers, slots, capacity)
        self.states: list[Tensor] = []
        self.drafted: list[Tensor] = []
        self._paths: dict[int, list[int]] = {}

    def allocate(self, sizes: Sequence[tuple[tuple[int, ...], int]]) -> None:
        """Allocate states of the given sizes, and room for what a token brings to each, in numbers."""
        slots = self.cursor.slots
        self.states = [torch.zeros(slots, *size) for size, _ in sizes]
        self.drafted = [torch.zeros(slots, DRAFTS, numbers) for _, numbers in sizes]

    @property
    def drafts(self) -> int:
        """Nodes of a tree for which there is room."""
        return self.drafted[0].shape[1]

    def make_room(self, drafts: int) -> bool:
        """Room for trees of so many nodes; whether it had to be allocated, the contents kept."""
        if drafts <= self.drafts:
            return False
        before, room = self.drafted, max(drafts, 2 * self.drafts)
        self.drafted = [old.new_zeros(len(old), room, old.shape[2]) for old in before]
        for new, old in zip(self.drafted, before, strict=True):
            new[:, : old.shape[1]] = old
        return True

    def begin(self, slot: int) -> None:
        """A row begins in a slot: its states are those before the first token."""
        self._paths.pop(slot, None)
        for states in self.states:
            states[slot] = 0

    def committed_path(self, slot: int) -> list[int]:
        """The nodes of a slot's latest tree that were committed and are not in its states; the next pass adds them."""
        return self._paths.pop(slot, [])

    def clear(self) -> None:
        super().clear()
        self._paths.clear()

    def commit(self, slot: int, path: Sequence[int]) -> None:
        super().commit(slot, path)
        self._paths.setdefault(slot, []).extend(path)

    def release(self, slot: int) -> None:
        last = len(self.lengths) - 1
        super().release(slot)
        self._move(last, slot)

    def activate(self, slot: int) -> int:
        new = super().activate(slot)
        if slot != new:
            if slot in self.cursor.reading:  # the row that was read in the new slot
                self._swap(slot, new)
            else:
                self._move(slot, new)
        return new

    def discard(self, slot: int) -> None:
        super().discard(slot)
        self._paths.pop(slot, None)

    def _move(self, source: int, target: int) -> None:
        path = self._paths.pop(source, None)
        if source == target:
            return
        self._paths.pop(target, None)
        if path is not None:
            self._paths[target] = path
        for kept in (*self.states, *self.drafted):
            kept[target] = kept[source]

    def _swap(self, one: int, other: int) -> None:
        paths = {a: self._paths.pop(b) for a, b in ((one, other), (other, one)) if b in self._paths}
        self._paths |= paths
        for kept in (*self.states, *self.drafted):
            kept[[one, other]] = kept[[other, one]]
