"""A growing tree as a draft model reads it, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.drafters._growing import GrowingTree
from truedraft.tree import DraftTree
from truedraft.tree_shape import ROOT, TreeShape, shape_of


@dataclass
class Branch:
    """A growing tree as the draft model reads it.

    nodes: of the tree, those that its cache holds behind the slot's tokens, in the order of passes. place: node -> its
    index among these. parent: by place, that of the parent. shape: of the first of these.
    """

    tree: GrowingTree
    nodes: list[int] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)
    parent: list[int] = field(default_factory=list)
    shape: TreeShape = ROOT

    @property
    def begins(self) -> bool:
        """Whether nothing was read of it."""
        return not self.nodes

    def next_input(self, count: int) -> tuple[DraftTree, int]:
        """The nodes that the cache holds after the next pass, and how many of them it holds before.

        count: nodes of the frontier, which the pass reads; at first the root and some below it, with the tokens before.
        """
        tree, written = self.tree, len(self.nodes)
        self.add([*(range(tree.root) if self.begins else ()), *tree.frontier[:count]])
        parent, shape = self.parent, self.shape
        self.shape = shape.grown(parent[len(shape.parent) :]) if written else shape_of(tuple(parent))
        ids = tree.ids
        return DraftTree.of_shape(tuple([ids[node] for node in self.nodes]), self.shape), written

    def add(self, nodes: Sequence[int]) -> None:
        """Add nodes of the tree behind those that the cache holds."""
        for node in nodes:
            self.place[node] = len(self.nodes)
            self.parent.append(self.place[self.tree.parent[node]] if node else -1)
            self.nodes.append(node)

    def pop(self) -> None:
        """Remove the last node, unless it is the root."""
        if len(self.nodes) > 1:
            del self.place[self.nodes.pop()]
            self.parent.pop()

    def rooted(self) -> list[int]:
        """Begin at the root; returns the tokens before it, if there are any, which the cache keeps."""
        count = self.place[self.tree.root]
        if count:
            self.nodes = self.nodes[count:]
            self.parent = [-1, *(place - count for place in self.parent[count + 1 :])]
            self.place = {node: place for place, node in enumerate(self.nodes)}
            self.shape = ROOT
        return self.tree.ids[:count]

    def path_along(self, text: Sequence[int]) -> list[int]:
        """The places from the root on whose tokens begin a text."""
        path: list[int] = []
        above = -1
        for token in text:
            found = next(
                (
                    place
                    for place in range(above + 1, len(self.nodes))
                    if self.parent[place] == above and self.tree.ids[self.nodes[place]] == token
                ),
                None,
            )
            if found is None:
                break
            path.append(found)
            above = found
        return path
