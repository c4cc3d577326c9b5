"""SSD: later canvases of several orders, likeliest first.

As FreeDave, and besides the most confident position of the latest predictions also the next ones may be fixed first:
the canvases are a tree of such choices, of which the likeliest are verified. Two orders of the same positions lead to
one canvas. How often the step of the reference is the first, second ... of the predictions before it is learnt from the
row itself.

Gao et al., "Self Speculative Decoding for Diffusion Large Language Models" (SSD), arXiv 2510.04147 (2025), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from truedraft.canvas._base import OWN, CanvasRow, Draft, Fixed, Policy, Predictions, Rates, Speculator
from truedraft.card import Card, knob

PRIOR = 0.6  # share of the steps that are the first of the predictions before, before any was observed


@dataclass
class Ssd(Speculator):
    card = Card(
        paper="arXiv 2510.04147 (2025)",
        idea="Verify canvases of several orders in which the latest predictions may be fixed, the likeliest first.",
        family="tree",
        published="Up to 3.46 times on LLaDA and Dream, with the output of step-by-step decoding.",
        also={
            "ssd-dllm": "",
        },
    )
    canvases: int = knob(4, 1, 64)  # scored per pass besides the row's own (3 to 5)
    orders: int = knob(3, 1, 16)  # positions of one canvas that may be fixed next

    def propose(self, row: CanvasRow, policy: Policy, least: float) -> list[Draft]:
        if row.predictions is None:
            return []
        ranks = self._ranks(row)
        found: list[Draft] = []
        number = count()
        waiting: list[tuple[float, int, Draft, Predictions]] = [(-1.0, next(number), OWN, row.predictions)]
        while waiting and len(found) <= self.canvases:
            _, _, draft, left = heappop(waiting)
            if draft in found:
                continue
            found.append(draft)
            for rank, step in enumerate(self._steps(left, row, policy)):
                if (chance := draft.chance * ranks[rank]) >= least:
                    later = Draft(draft.fixed | step, draft.steps + 1, chance)
                    heappush(waiting, (-chance, next(number), later, left.after(step, 1)))
        return found[1:]

    def _ranks(self, row: CanvasRow) -> Rates:
        """How often the step of a row was the first, second ... of the predictions before it."""
        prior = [PRIOR * (1 - PRIOR) ** rank for rank in range(self.orders)]
        return row.memory.setdefault(id(self), Rates(prior))

    def _steps(self, left: Predictions, row: CanvasRow, policy: Policy) -> list[Fixed]:
        """What the next step may fix, in the order of its ranks."""
        if not len(left):
            return []
        first = policy.choose(left, row)
        others = [left.fix([i]) for i in left.order[: self.orders]] if len(first) == 1 else []
        return [first, *(step for step in others if step != first)][: self.orders]

    def observe(self, row: CanvasRow, policy: Policy, drafts: Sequence[Draft], path: Sequence[Fixed]) -> None:
        if row.predictions is not None:
            for rank, step in enumerate(self._steps(row.predictions, row, policy)):
                self._ranks(row).observe(rank, step == path[0])
