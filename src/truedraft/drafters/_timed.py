"""The measured seconds of a level of a draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from truedraft.drafters._base import usual_seconds
from truedraft.drafters._growing import GrowingDrafter, GrowingTree


class TimedLevels(GrowingDrafter):
    """A drafter that measures its levels, for drafts sized by what these cost."""

    _of_level = 0.0  # seconds of a level after the first; a moving average

    def _level(self, active: Sequence[GrowingTree]) -> None:
        begins = any(tree.frontier == [tree.root] for tree in active)
        start = time.perf_counter()
        super()._level(active)
        self._measure(time.perf_counter() - start, begins)

    def _measure(self, seconds: float, begins: bool) -> None:
        if begins:  # it reads more tokens than later levels, and bounds their time where these were interrupted
            self._of_level = min(self._of_level, seconds)
        else:
            self._of_level = usual_seconds(self._of_level, seconds)


class PayingLevels(TimedLevels):
    """Trees of the most probable paths that end, under the cost control, where another level would not pay, by the
    measured seconds of levels and passes.

    Fields of every subclass: nodes (drafted at most).
    """

    nodes: int
    _per_level = 1.0  # levels of a draft that a pass of the reader adds; a moving average

    def paying(self, rows: int) -> dict[str, Any]:
        """The fields of `TreeGrowth` by which compiled code decides as `continues` does."""
        found: dict[str, Any] = {"nodes": self.nodes, "more": round(self._per_level)}
        if (cost := self.pass_cost) is not None:
            found |= {"plain": cost.plain / rows, "node": cost.node, "level": self._of_level}
        return found

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        """Whether the next level adds more tokens per second than the pass has with the draft so far.

        Nodes whose children would not be worth their share of the verifying pass are not expanded. The rate of
        acceptance of the next levels is taken to be the mean of those of the levels before.
        """
        if self.pass_cost is None or not growing.score:
            return True
        node, level = self.pass_cost.node, self._of_level / active
        depth = growing.depth[growing.frontier[0]]
        tokens, seconds = 1.0, self.pass_cost.plain / rows + growing.passes * level
        for score in sorted(growing.score.values(), reverse=True)[: min(self.nodes, growing.budget)]:
            if score * seconds <= tokens * node:
                break
            tokens, seconds = tokens + score, seconds + node
        goodput = tokens / seconds
        mean = min(sum(growing.score[n] for n in growing.frontier), 1.0) ** (1 / depth)
        growing.frontier = [n for n in growing.frontier if mean * growing.score[n] > goodput * node]
        more = round(self._per_level)
        gain = sum(mean**k for k in range(1, more + 1)) * sum(growing.score[n] for n in growing.frontier)
        return gain > goodput * (level + more * node)
