"""Trees whose shape is given before they grow: so many children of each node."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._ranked import RankedGrowth
from truedraft.runtime._base import TreeGrowth

NODES = 1024  # most nodes of a tree given by its branching factors
BRANCHES = (
    f"how many children a node has, level by level, as in '4x2x1', or node by node, as in '2x2.1'; {NODES:,} nodes in "
    "all at most"
)


class OfShape(RankedGrowth):
    """Trees whose shape is given before they grow."""

    @abstractmethod
    def shape_of(self, growing: GrowingTree) -> Sequence[Sequence[int]]:
        """By level from the root on, the number of children of each of its nodes."""

    def children_of(self, growing: GrowingTree, node: int) -> int:
        """How many children a node has in the shape."""
        depth, shape = growing.depth[node], self.shape_of(growing)
        return shape[depth][growing.place.get(node, 0)] if depth < len(shape) else 0

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> TreeGrowth | None:
        shapes = [self.shape_of(tree) for tree in growing]
        levels = [level for shape in shapes for level in shape]
        return TreeGrowth(
            children=max(map(max, levels)), width=max(sum(map(bool, level)) for level in levels),
            levels=max(map(len, shapes)),
        )  # fmt: skip

    def given_shape(self, growing: GrowingTree) -> Sequence[int]:
        return [*chain.from_iterable(self.shape_of(growing))]

    def branch(self, growing: GrowingTree, node: int, tokens: Sequence[int], law: Tensor | None = None) -> list[int]:
        """Add the first children of a node, see `GrowingTree.add`; returns those that have children in the shape."""
        first = sum(self.shape_of(growing)[growing.depth[node]][: growing.place.get(node, 0)])
        added = growing.add(node, tokens, law)
        growing.place |= {child: first + i for i, child in enumerate(added)}
        return [child for child in added if self.children_of(growing, child)]

    def most_children(self, growing: GrowingTree) -> int:
        return min(max(self.children_of(growing, node) for node in growing.frontier), growing.room)

    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        added = []
        for node, some in zip(nodes, tokens, strict=True):
            added += self.branch(growing, node, some[: self.children_of(growing, node)])
        growing.end_level(added)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        """Add the children that the shape has: drawn without replacement, or the likeliest."""
        added = []
        for node, law in zip(nodes, laws, strict=True):
            count = min(self.children_of(growing, node), growing.room)
            added += self.branch(growing, node, self.chosen(growing, node, law, count), law)
        growing.end_level(added)


class Branching(OfShape):
    """Trees of a given shape: a number of children per level, or per node of a level.

    Further fields of every subclass: branches, see `branched`.
    """

    branches: str

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        self._shape = branched(self.branches)

    @property
    def width(self) -> int:
        return nodes_of(self._shape)

    @property
    def levels(self) -> int:
        return len(self._shape)

    def shape_of(self, growing: GrowingTree) -> Sequence[Sequence[int]]:
        return self._shape


def branched(text: str) -> tuple[tuple[int, ...], ...]:
    """By level from the root on, the number of children of each of its nodes.

    "4x2x1" has four children below the root, two below each, and one below each of these. "3x2.1" has three below the
    root, and of these the first two have two and one; nodes that are left out have none.

    Raises:
        ValueError: another format, or a tree of more than `NODES` nodes.
    """
    shape: list[tuple[int, ...]] = []
    nodes = 1
    for level in text.split("x"):
        counts = [int(count) for count in level.split(".")]
        counts = counts * nodes if len(counts) == 1 else counts + [0] * (nodes - len(counts))
        if len(counts) != nodes or min(counts) < 0 or not 1 <= sum(counts) <= NODES or nodes_of(shape) > NODES:
            raise ValueError
        nodes = sum(counts)
        shape.append(tuple(counts))
    if nodes_of(shape) > NODES:
        raise ValueError
    return tuple(shape)


def nodes_of(shape: Sequence[Sequence[int]]) -> int:
    """Nodes below the root of a tree of this shape."""
    return sum(map(sum, shape))
