"""FreeDave: the latest predictions, fixed one step after another in the order of their confidence, are the draft.

Each pass scores the row's canvas and a chain of later ones at once. The first is right; from each right one, the step
of the reference leads to another, and where that is in the chain it is right too. No pass is spent on verification
alone, since the predictions at the last right canvas are the next draft.

Wu and Zhang, "Free Draft-and-Verification" (FreeDave), arXiv 2510.00294 (2025), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import NOTHING, CanvasRow, Draft, Policy, Speculator
from truedraft.card import Card, knob


@dataclass
class Freedave(Speculator):
    card = Card(
        paper="arXiv 2510.00294 (2025)",
        idea="Verify the next steps that the latest predictions lead to, in one pass.",
        family="chain",
        published="Up to 3.78 times the throughput on mathematics and code, without loss.",
    )
    canvases: int = knob(4, 1, 64)  # scored per pass besides the row's own (4 for LLaDA, 8 for Dream and SDAR)

    def propose(self, row: CanvasRow, policy: Policy) -> list[Draft]:
        chain: list[Draft] = []
        fixed, left = NOTHING, row.predictions
        while left is not None and len(left) and len(chain) < self.canvases:
            step = policy.choose(left, row)
            fixed, left = fixed | step, left.after(step, 1)
            chain.append(Draft(fixed, len(chain) + 1))
        return chain
