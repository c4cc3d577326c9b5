"""A head over exit states, those behind the target's first layers, and the passes of these layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._views import ViewReader
from truedraft.drafters.heads._head import Head
from truedraft.drafters.heads._reader import Branches, HeadReader, joined
from truedraft.errors import Refused
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.panels import Int8Copies
from truedraft.tree import Row
from truedraft.views._base import Reduction, View


def exit_of(exit: int, layers: int) -> int:
    """The layers of a target that run before the exit: a third of them where it is 0.

    Raises:
        Refused: there are no layers left.
    """
    if exit >= layers:
        raise Refused(f"eesd:exit={exit}: the decoder has {layers} layers, leave out at least one")
    return exit or max(layers // 3, 1)


@dataclass(frozen=True)
class FirstLayers(View):
    """The first layers of a decoder, without its output head."""

    exit: int

    @property
    def name(self) -> str:
        return "eesd"

    def reduction(self, layers: int) -> Reduction:
        rest = frozenset(range(exit_of(self.exit, layers), layers))
        return Reduction(rest, rest, output_head=True)


class ExitReader(HeadReader):
    """A head over exit states as a `LevelReader`.

    A row's token i is read with its own exit state, at place and position i. Those of a row's tokens come from the
    passes that have verified them, those of the pending and of drafted tokens from passes under a view (`exits`).
    """

    exits: ViewReader

    def __init__(self, head: Head, int8: Int8Copies | None = None):
        super().__init__(head, int8)
        (self._layer,) = head.layers

    def catch_up(self, rows: Sequence[Row]) -> None:
        super().catch_up(rows)
        self.exits.catch_up(rows)

    def tokens_read(self, row: Row, after: int) -> int | None:
        return None if super().tokens_read(row, after) is None else self.exits.tokens_read(row, after)

    def _beside(self, row: Row, place: int, features: Tensor) -> Tensor:
        return features

    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        exits = self.exits.states(growing, self._layer).to(self.head.dtype)
        nodes, states, gather = Nodes(), list[Tensor](), list[int]()
        for tree, some in zip(growing, exits.split([len(tree.frontier) for tree in growing]), strict=True):
            if id(tree.row) not in self._branches:
                self._begin(tree, nodes, [], states)
            self._branches[id(tree.row)].add_frontier(nodes)
            gather += range(len(nodes) - len(some), len(nodes))
            states.append(some)
        given = joined(states)
        return self.passes.run(nodes, given, given, gather)[1]

    def _rooted(self, tree: GrowingTree, slot: int, length: int) -> Branches:
        """A growing tree behind the places that are read."""
        return Branches(tree, slot, length, length, {tree.parent[tree.root]: ()})

    def grown(self, growing: Sequence[GrowingTree]) -> None:
        self.exits.grown(growing)
