"""Drafts that grow level by level, by passes of the target under a view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.drafters._confidence import ConfidenceTree
from truedraft.drafters._growing import GrowingTree
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Row, Scores
from truedraft.views._base import View

NOTHING = DraftTree.chain(0)


@dataclass
class _Path:
    """The nodes of a growing draft that all nodes of its frontier descend from: the target's scratch holds them.

    scored: the nodes of the last pass, in order. tree: these, and what was read ahead.
    """

    nodes: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    tree: DraftTree = NOTHING

    def place(self, node: int) -> int:
        return self.scored.index(node)


class ViewReader:
    """The distributions of the target under a view; see `LevelReader`.

    Args:
        target: the target.
        views: the view by depth of the nodes that a pass expands, the pending token at 0.
    """

    def __init__(self, target: Target, views: Sequence[View]):
        self.target, self.views = target, views
        self._view = views[0]  # of the last pass
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

    def expand(self, growing: Sequence[GrowingTree], ahead: Sequence[DraftTree] = ()) -> Tensor:
        """One pass under the view of the shallowest frontier; see `LevelReader`.

        ahead: by draft, a tree below the last node of its frontier, the root, to be scored in the same pass; the logits
            at its other nodes follow those of the frontier.
        """
        scores, at = self._pass(growing, ahead)
        return scores.logits[torch.tensor([row for row, _ in at]), torch.tensor([node for _, node in at])]

    def states(self, growing: Sequence[GrowingTree], layer: int) -> Tensor:
        """One pass, in the place of `expand`: (k, H) hidden states of a layer that the views tap, at the k frontier
        nodes of all trees, in order."""
        scores, at = self._pass(growing)
        return torch.stack([scores.hidden[layer][row][node] for row, node in at])

    def _pass(
        self, growing: Sequence[GrowingTree], ahead: Sequence[DraftTree] = ()
    ) -> tuple[Scores, list[tuple[int, int]]]:
        """Its scores, and the row and the node there of each frontier node of all trees and those ahead, in order."""
        ahead = ahead or [NOTHING] * len(growing)
        paths = [self._scored(tree, more) for tree, more in zip(growing, ahead, strict=True)]
        self._view = self.views[min(tree.depth[tree.frontier[0]] for tree in growing)]
        slots = [tree.row.slot for tree in growing]
        order = sorted(range(len(slots)), key=slots.__getitem__)
        scores = self.target.score([paths[i].tree for i in order], self._view, [slots[i] for i in order])
        row = {i: k for k, i in enumerate(order)}
        at = [
            (row[i], node)
            for i, (tree, path) in enumerate(zip(growing, paths, strict=True))
            for node in [*map(path.place, tree.frontier), *range(len(path.scored), len(path.tree))]
        ]
        return scores, at

    def grown(self, growing: Sequence[GrowingTree]) -> None:
        growing = [tree for tree in growing if tree.frontier]
        if not growing:
            return
        growing = sorted(growing, key=lambda tree: tree.row.slot)
        kept = [self._shared(tree) for tree in growing]
        places = [self._places(tree, nodes) for tree, nodes in zip(growing, kept, strict=True)]
        self.target.advance(self._view, places, [tree.row.slot for tree in growing])
        for tree, nodes in zip(growing, kept, strict=True):
            self._paths[id(tree)].nodes += nodes

    def _places(self, tree: GrowingTree, nodes: Sequence[int]) -> list[int]:
        """The places in the last pass of nodes on one path, from the top; those read ahead are found by their token."""
        path, places = self._paths[id(tree)], list[int]()
        for node in nodes:
            place = path.place(node) if node in path.scored else path.tree.child(places[-1], tree.tokens[node])
            assert place is not None
            places.append(place)
        return places

    def _scored(self, tree: GrowingTree, ahead: DraftTree) -> _Path:
        """A draft's path, to be scored: its frontier and its ancestors that the scratch does not hold, and `ahead`."""
        path = self._paths.setdefault(id(tree), _Path())
        held, needed = set(path.nodes), set[int]()
        for node in tree.frontier:
            while node >= 0 and node not in held and node not in needed:
                needed.add(node)
                node = tree.parent[node]
        path.scored = sorted(needed)
        new, last = {node: i for i, node in enumerate(path.scored)}, len(path.scored) - 1
        path.tree = DraftTree(
            (*(tree.tokens[node] for node in path.scored), *ahead.tokens[1:]),
            (
                *(new.get(tree.parent[node], -1) for node in path.scored),
                *(last + p if p else new[tree.frontier[-1]] for p in ahead.parent[1:]),
            ),
        )
        return path

    def _shared(self, tree: GrowingTree) -> list[int]:
        """The nodes of the last pass that all nodes of the new frontier descend from, from the top; without the last of
        them where several do, since a pass scores a tree from one root."""
        shared = sorted(set.intersection(*[self._ancestors(tree, node) for node in tree.frontier]))
        held = set(self._paths[id(tree)].nodes)
        return [node for node in shared[: len(shared) - (len(tree.frontier) > 1)] if node not in held]

    @staticmethod
    def _ancestors(tree: GrowingTree, node: int) -> set[int]:
        found = set()
        while (node := tree.parent[node]) >= 0:
            found.add(node)
        return found


class ViewTree(ConfidenceTree):
    """Dynamic trees, each level of them by a pass of the target under a view; fields as of `ConfidenceTree`."""

    @property
    def width(self) -> int:
        return max(self.nodes, self.depth * self.expanded + 1)  # positions that passes need behind a row

    def run_under(self, target: Target, views: Sequence[View]) -> ViewReader:
        """What runs a target under the view of each depth.

        Raises:
            Refused: it cannot run under one of them, or generates under a view itself.
        """
        check_whole(target)
        self.check(target, views)
        self._target = target
        self._share = self.mean_share(views)
        return ViewReader(target, views)

    def check(self, target: Target, views: Sequence[View]) -> None:
        """Raises Refused where the target cannot run under one of these views."""
        for view in dict.fromkeys(views):
            target.check_view(view)

    def mean_share(self, views: Sequence[View]) -> float:
        """What a level reads of the target's weights, over all of them, in the mean over the views."""
        return sum(count * self._target.share(view) for view, count in Counter(views).items()) / len(views)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        if self.pass_cost is not None and not self._of_level:
            self._of_level = self._share * self.pass_cost.plain  # until it is measured
        drafts = super().propose(rows, budget)
        self._target.rewind()
        return drafts


def check_whole(target: Target) -> None:
    """Raises Refused where a target generates under a view, so that its own passes cannot draft for it."""
    if target.view is not None:
        raise Refused(
            f"a target that drafts for itself drafts for the whole model, and this one generates under "
            f"{target.view.lossy}: use another drafter"
        )
