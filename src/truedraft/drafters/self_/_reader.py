"""Runs the target under a view, level by level of growing drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.drafters._growing import GrowingTree
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Row
from truedraft.views._base import View


@dataclass
class _Path:
    """The nodes of a growing draft that all nodes of its frontier descend from: the target's scratch holds them.

    scored: the nodes of the last pass, in order.
    """

    nodes: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)


class ViewReader:
    """The distributions of the target under a view; see `LevelReader`.

    views: the view by depth of the nodes that a pass expands, the pending token at 0.
    """

    views: Sequence[View]

    def __init__(self, target: Target):
        self.target = target
        self._paths: dict[int, _Path] = {}  # by growing draft

    def start(self, rows: Sequence[Row], more: int) -> None:
        """Nothing to reserve: the scratch has room for the drafter's width."""

    def end(self, row: Row) -> None:
        """Nothing to release."""

    def catch_up(self, rows: Sequence[Row]) -> None:
        """The target has committed all tokens but the pending one."""
        self._paths.clear()
        self.target.rewind()

    def tokens_read(self, row: Row, after: int) -> int | None:
        return len(row.tokens) - 1

    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        trees = [self._scored(tree) for tree in growing]
        view = self.views[growing[0].depth[growing[0].frontier[0]]]
        slots = [tree.row.slot for tree in growing]
        order = sorted(range(len(slots)), key=slots.__getitem__)
        logits = self.target.score([trees[i] for i in order], view, [slots[i] for i in order]).logits
        place = {i: k for k, i in enumerate(order)}
        at = [
            (place[i], self._paths[id(tree)].scored.index(node))
            for i, tree in enumerate(growing) for node in tree.frontier
        ]  # fmt: skip
        return logits[torch.tensor([row for row, _ in at]), torch.tensor([node for _, node in at])]

    def grown(self, growing: Sequence[GrowingTree]) -> None:
        growing = [tree for tree in growing if tree.frontier]
        if not growing:
            return
        growing = sorted(growing, key=lambda tree: tree.row.slot)
        kept = [self._shared(tree) for tree in growing]
        view = self.views[growing[0].depth[growing[0].frontier[0]] - 1]
        paths = [
            [self._paths[id(tree)].scored.index(node) for node in nodes]
            for tree, nodes in zip(growing, kept, strict=True)
        ]
        self.target.advance(view, paths, [tree.row.slot for tree in growing])
        for tree, nodes in zip(growing, kept, strict=True):
            self._paths[id(tree)].nodes += nodes

    def _scored(self, tree: GrowingTree) -> DraftTree:
        """The frontier of a draft and its ancestors that the scratch does not hold, as a tree."""
        path = self._paths.setdefault(id(tree), _Path())
        held, needed = set(path.nodes), set[int]()
        for node in tree.frontier:
            while node >= 0 and node not in held and node not in needed:
                needed.add(node)
                node = tree.parent[node]
        path.scored = sorted(needed)
        new = {node: i for i, node in enumerate(path.scored)}
        return DraftTree(
            tuple(tree.tokens[node] for node in path.scored),
            tuple(new.get(tree.parent[node], -1) for node in path.scored),
        )

    def _shared(self, tree: GrowingTree) -> list[int]:
        """The nodes of the last pass that all nodes of the new frontier descend from, from the top; without the last of
        them where several do, since a pass scores a tree from one root."""
        shared = sorted(set.intersection(*[self._ancestors(tree, node) for node in tree.frontier]))
        scored = set(self._paths[id(tree)].scored)
        return [node for node in shared[: len(shared) - (len(tree.frontier) > 1)] if node in scored]

    @staticmethod
    def _ancestors(tree: GrowingTree, node: int) -> set[int]:
        found = set()
        while (node := tree.parent[node]) >= 0:
            found.add(node)
        return found
