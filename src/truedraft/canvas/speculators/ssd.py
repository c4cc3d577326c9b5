"""SSD: later canvases of several orders, likeliest first.

As FreeDave, and besides the most confident position of the latest predictions also the next ones may be fixed first:
the canvases are a tree of such choices, of which the likeliest are verified. Two orders of the same positions lead to
one canvas. How often the step of the reference is the first, second ... of the predictions before it is learnt from the
row itself.

Gao et al., "Self Speculative Decoding for Diffusion Large Language Models" (SSD), arXiv 2510.04147 (2025), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from truedraft.canvas._base import NOTHING, CanvasRow, Draft, Fixed, Policy, Predictions, Speculator
from truedraft.card import Card, knob

PRIOR = 0.6  # share of the steps that are the first of the predictions before, before any was observed
DOUBT = 4.0  # its weight, in steps


@dataclass
class Ranks:
    """How often the step of a row was the first, second ... of the predictions before it.

    counts: by rank. steps: all of them.
    """

    counts: list[float]
    steps: float = 0.0

    def chance(self, rank: int) -> float:
        return (self.counts[rank] + DOUBT * PRIOR * (1 - PRIOR) ** rank) / (self.steps + DOUBT)

    def observe(self, rank: int | None) -> None:
        """The next step was of this rank among its choices; None for none of them."""
        self.counts = [0.97 * count + (i == rank) for i, count in enumerate(self.counts)]
        self.steps = 0.97 * self.steps + 1


@dataclass
class Ssd(Speculator):
    card = Card(
        paper="arXiv 2510.04147 (2025)",
        idea="Verify canvases of several orders in which the latest predictions may be fixed, the likeliest first.",
        family="tree",
        published="Up to 3.46 times on LLaDA and Dream, with the output of step-by-step decoding.",
    )
    canvases: int = knob(4, 1, 64)  # scored per pass besides the row's own (3 to 5)
    orders: int = knob(3, 1, 16)  # positions of one canvas that may be fixed next

    def propose(self, row: CanvasRow, policy: Policy) -> list[Draft]:
        if row.predictions is None:
            return []
        ranks: Ranks = row.memory.setdefault(id(self), Ranks([0.0] * self.orders))
        found: dict[Draft, float] = {}
        number = count()
        waiting: list[tuple[float, int, Fixed, int, Predictions]] = []

        def expand(chance: float, fixed: Fixed, steps: int, left: Predictions) -> None:
            for rank, step in enumerate(self._steps(left, row, policy)):
                likely = chance * ranks.chance(rank)
                heappush(waiting, (-likely, next(number), fixed | step, steps + 1, left.after(step, 1)))

        expand(1.0, NOTHING, 0, row.predictions)
        while waiting and len(found) < self.canvases:
            chance, _, fixed, steps, left = heappop(waiting)
            if (draft := Draft(fixed, steps)) not in found:
                found[draft] = -chance
                expand(-chance, fixed, steps, left)
        return list(found)

    def _steps(self, left: Predictions, row: CanvasRow, policy: Policy) -> list[Fixed]:
        """What the next step may fix, in the order of its ranks."""
        if not len(left):
            return []
        first = policy.choose(left, row)
        others = [left.fix([i]) for i in left.order[: self.orders]] if len(first) == 1 else []
        return [first, *(step for step in others if step != first)][: self.orders]

    def observe(self, row: CanvasRow, policy: Policy, before: Predictions, step: Fixed) -> None:
        ranks: Ranks = row.memory.setdefault(id(self), Ranks([0.0] * self.orders))
        steps = self._steps(before, row, policy)
        ranks.observe(steps.index(step) if step in steps else None)
