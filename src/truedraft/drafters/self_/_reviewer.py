"""A drafter by a view that is drafted for itself: a pass under the view reads several tokens, and adds those it agrees
with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from truedraft.drafters._base import Continuing, PassCost, moving_average, usual_seconds
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.self_._below import Below
from truedraft.drafters.self_._drafter import SelfDrafter
from truedraft.errors import Refused
from truedraft.tree import DraftTree, Row


class Reviewer(SelfDrafter):
    """Drafts by passes of the target under a view, each over what another drafter continues its draft with.

    A pass adds to a draft the tokens that the view would have chosen too, and the one that it chooses next: the same
    draft as without `inner`, in fewer passes.

    Args:
        drafter: by the view.
        inner: what drafts for it.

    Raises:
        Refused: the drafter by the view does not draft chains of its likeliest tokens.
    """

    def __init__(self, drafter: SelfDrafter, inner: Continuing):
        if drafter.top_k > 1 or drafter.drawn:
            raise Refused(
                f"{drafter.name} drafts a chain of its likeliest tokens where another drafter drafts for it: leave out "
                "top_k and drawn"
            )
        self._inner = inner
        super().__init__(**{field.name: getattr(drafter, field.name) for field in fields(drafter)})

    def forget(self) -> None:
        super().forget()
        self._below = Below(self._inner)
        self._of_pass = 0.0  # seconds of a pass under the view; a moving average
        self._rows: Sequence[Row] = ()  # of the pass that is drafted for

    def end(self, row: Row) -> None:
        super().end(row)
        self._below.end(row)
        self._rows = [other for other in self._rows if other is not row]

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self._rows = rows
        return super().propose(rows, budget)

    def _level(self, active: Sequence[GrowingTree]) -> None:
        begins, began = any(tree.frontier == [tree.root] for tree in active), time.perf_counter()
        self._below.cost = cost = self._cost()
        ahead = self._below.drafts(self._rows, active, [self._more(tree) for tree in active])
        drafted = time.perf_counter()
        logits = self.reader.expand(active, ahead)
        at = [
            (growing.row, [*growing.path(growing.frontier[-1]), *(tree.tokens[i] for i in tree.path(node)[1:])])
            for growing, tree in zip(active, ahead, strict=True)
            for node in range(len(tree))
        ]
        laws = self.laws([row for row, _ in at], [path for _, path in at], logits).split(list(map(len, ahead)))
        reached = [self._add(*each) for each in zip(active, ahead, laws, strict=True)]
        self.reader.grown(active)
        ended = time.perf_counter()
        self._of_pass = usual_seconds(cost.plain if cost is not None else 0.0, ended - drafted)
        self._measure(ended - began, begins)
        added = [1 + tree.shape.depth[node] for tree, node in zip(ahead, reached, strict=True)]
        self._per_level = moving_average(self._per_level, sum(added) / len(added))
        self._below.reviewed(ahead, reached)

    def _cost(self) -> PassCost | None:
        """Of a pass under the view."""
        if self.pass_cost is None:
            return None
        return PassCost(self._of_pass or self._share * self.pass_cost.plain, self._share * self.pass_cost.node)

    def _more(self, growing: GrowingTree) -> int:
        """Tokens that may be read behind the frontier, so that each has a child in the draft."""
        most = min(growing.deepest, growing.budget, self.nodes)
        return max(most - growing.depth[growing.frontier[-1]] - 1, 0)

    def _add(self, growing: GrowingTree, ahead: DraftTree, laws: Tensor) -> int:
        """Add the tokens that the view chooses, as far as it has read; returns the last node of `ahead` among them.

        laws: (n, V), at the nodes of `ahead`.
        """
        growing.passes += 1
        node: int | None = 0
        while node is not None:
            reached = node
            self.grow(growing, growing.frontier, laws[node : node + 1])
            node = ahead.child(node, growing.tokens[growing.frontier[0]]) if growing.frontier else None
        return reached
