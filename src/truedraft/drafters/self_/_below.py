"""What a drafter drafts for the passes that grow another's drafts, as long as that pays."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence

from truedraft.drafters._base import Continuing, PassCost, moving_average, usual_seconds
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._trees import values_of
from truedraft.tree import DraftTree, Row

KEPT = 0.98  # weight that the counts of tokens keep at each later one
PRIOR = 4.0  # of them, to begin with
CREDIT = 0.15  # of a pass: what it is expected to save to begin with, and when it is called again
AGAIN, LONGEST = 8, 64  # passes that nothing is drafted for, after some for which it did not pay: at first, and at most


class Below:
    """Drafts for passes that grow drafts, in the place of a drafter.

    cost: seconds of such a pass without a draft, and those that one drafted token adds; None where drafts need not pay.
    """

    cost: PassCost | None = None

    def __init__(self, drafter: Continuing):
        self.drafter = drafter
        self._begun: set[Row] = set()  # rows that it has drafted for
        self._right, self._tried = PRIOR * drafter.prior_confidence, PRIOR  # decayed counts of tokens
        self._seconds = self._of_token = 0.0  # of drafting; moving averages
        self._gain = 0.0  # seconds that it saved per pass; a moving average
        self._called = False  # for the last pass
        self._resting, self._rest = 0, AGAIN  # passes that it is not called for: now, and the next time

    def drafts(self, rows: Sequence[Row], growing: Sequence[GrowingTree], most: Sequence[int]) -> list[DraftTree]:
        """For each growing draft a tree of at most so many tokens below the last node of its frontier, the root.

        rows: all rows of the pass that the drafts are for.
        """
        self._called = any(most) and not self._resting
        self._resting = max(self._resting - 1, 0)
        if not self._called:
            return [DraftTree.chain(tree.tokens[tree.frontier[-1]]) for tree in growing]
        longest = self._longest()
        after = {tree.row: tree.path(tree.frontier[-1]) for tree in growing}
        budget = {tree.row: min(count, longest) for tree, count in zip(growing, most, strict=True)}
        began = time.perf_counter()
        found = self.drafter.extend_each(
            rows, [after.get(row, []) for row in rows], [budget.get(row, 0) for row in rows]
        )
        self._measure(rows, time.perf_counter() - began, max(map(len, found)) - 1)
        drafts = {row: tree.bare().cut(1 + budget.get(row, 0)) for row, tree in zip(rows, found, strict=True)}
        return [self._paying(tree.row, drafts[tree.row], len(growing)) for tree in growing]

    def reviewed(self, drafts: Sequence[DraftTree], reached: Sequence[int]) -> None:
        """The pass has agreed with the drafts down to these nodes."""
        if not self._called:
            return
        saved = -self._seconds
        for tree, node in zip(drafts, reached, strict=True):
            right, wrong = tree.shape.depth[node], bool(tree.shape.children[node])
            for correct in (*[1] * right, *[0] * wrong):
                self._right, self._tried = KEPT * self._right + correct, KEPT * self._tried + 1
            if self.cost is not None:
                saved += right * self.cost.plain / len(drafts) - (len(tree) - 1) * self.cost.node
        if self.cost is not None:
            self._review(saved, CREDIT * self.cost.plain)

    def _review(self, saved: float, expected: float) -> None:
        """Rest where it does not pay, longer each time."""
        self._gain = moving_average(self._gain or expected, saved)
        if self._gain < 0:
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST)
            self._gain = 0.0
        elif saved > 0:
            self._rest = AGAIN

    def end(self, row: Row) -> None:
        self._begun.discard(row)

    @property
    def _rate(self) -> float:
        """The share of tokens that are right, of those whose parent is."""
        return min(max(self._right / self._tried, 0.01), 0.99)

    def _longest(self) -> int:
        """Tokens of a draft, the last of which saves as much as it costs to draft."""
        if self.cost is None or not self.drafter.autoregressive or not self._of_token:
            return sys.maxsize
        return max(int(math.log(min(self._of_token / self.cost.plain, 1.0), self._rate)), 1)

    def _measure(self, rows: Sequence[Row], seconds: float, tokens: int) -> None:
        if self.drafter.reads_texts and any(row not in self._begun for row in rows):
            self._begun.update(rows)  # most of the time was that of reading them
        else:
            self._seconds = usual_seconds(self._seconds, seconds)
            self._of_token = usual_seconds(self._of_token, seconds / max(tokens, 1))

    def _paying(self, row: Row, tree: DraftTree, shared: int) -> DraftTree:
        """The nodes that are likely enough to save more of a pass than they cost, up to an end of the text.

        shared: drafts that share the pass.
        """
        if tree.confidence is None:
            tree = tree.replaced(confidence=(1.0, *[self._rate] * (len(tree) - 1)))
        values, kept = values_of(tree), [0]
        for node, parent in enumerate(tree.parent[1:], 1):
            pays = self.cost is None or values[node] * self.cost.plain > self.cost.node * shared
            if pays and parent in kept and tree.tokens[node] not in row.ends:
                kept.append(node)
        return tree.subtree(kept)
