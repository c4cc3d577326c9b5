"""LLaDA 2: every position whose prediction exceeds a threshold, if they are enough, else the most confident ones.

LLaDA 2.1 replaces known tokens as well; here what is known stays.

Bie et al., "LLaDA2.0", arXiv 2512.15745 (2025), and "LLaDA2.1", arXiv 2602.08676 (2026), with the constants of the code
of the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import Card, knob


@dataclass
class Llada2(LossyPolicy):
    card = Card(
        paper="arXiv 2512.15745 (2025), 2602.08676 (2026)",
        idea="Fix every position above a threshold, and never fewer than a number.",
        family="threshold",
    )
    threshold: float = knob(0.95, 0, 1)  # which a probability must exceed (0.95)
    least: int = knob(1, 1, 1024)  # positions per pass, where so many are masked (1)

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        count = sum(p > self.threshold for p in predictions.probability)
        return predictions.fix(predictions.order[: max(count, self.least)])
