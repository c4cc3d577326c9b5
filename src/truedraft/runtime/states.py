"""The compiled pass of models with states: those of a tree's nodes are computed from their parents' within the pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from truedraft.caches.drafted import DraftedStateCache
from truedraft.caches.rows import RowCache
from truedraft.errors import Refused
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.nodes import Nodes
from truedraft.tree import DraftTree, Piece, Scores, Taps
from truedraft.views._base import Reduction, View


class Branches(NamedTuple):
    """The nodes of one row of a pass: the parent of each within the row, and how many of them, the first, are committed
    by the pass."""

    slot: int
    parents: Sequence[int]
    settled: int


class CompiledStatePass(CompiledPass):
    """See `CompiledPass` and `native/recurrent.inc`."""

    cache: DraftedStateCache
    greedy_chains = False

    def attach(self, cache: RowCache | None) -> None:
        super().attach(cache)
        self._rows: list[Branches] = []
        if isinstance(cache, DraftedStateCache):
            if not cache.states:  # a cache that was detached for a while keeps its rows
                cache.allocate([(size, numbers) for _, size, numbers in self.program.states])
            self._point()

    def _point(self) -> None:
        """Point the operations at the cache's states."""
        for (op, _, _), states, drafted in zip(self.program.states, self.cache.states, self.cache.drafted, strict=True):
            op.keys, op.values = states.data_ptr(), drafted.data_ptr()
        self._variants = {}

    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        for piece in pieces:
            if piece.start == 0:
                self.cache.begin(piece.slot)
        self._rows = [
            Branches(piece.slot, range(-1, len(piece) - 1), len(piece) - piece.last) for piece in pieces
        ]  # fmt: skip
        return super().read_pieces(pieces, taps)

    def reduced(self, view: View) -> Reduction:
        raise Refused(
            f"{type(self.model).__name__} cannot run under {view.name}: it keeps states of all its layers, "
            "which a pass without some of them would change"
        )

    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        if self.cache.make_room(max(map(len, trees))):
            self._point()
        self._rows = [Branches(slot, tree.parent, 0) for slot, tree in enumerate(trees)]
        return super().score(trees, taps, view)

    def _complete(self, nodes: Nodes, numbers: dict[str, int], lists: dict[str, Sequence[int]]) -> None:
        row_from, path_from = [0], [0]
        parents: list[int] = []
        path: list[int] = []
        for row in self._rows:
            first = len(parents)
            parents += [-1 if parent < 0 else first + parent for parent in row.parents]
            path += self.cache.committed_path(row.slot)
            row_from.append(len(parents))
            path_from.append(len(path))
        numbers |= {"rows": len(self._rows), "drafted": self.cache.drafts}
        settled = [row.settled for row in self._rows]
        lists |= {"row_from": row_from, "parent": parents, "settled": settled, "path_from": path_from, "path": path}
