"""Low-confidence remasking, one position per pass: the reference of diffusion language models.

Every pass predicts a token at each masked position of a block, and the one with the largest probability is fixed; all
others remain masks.

Nie et al., "Large Language Diffusion Models" (LLaDA), arXiv 2502.09992 (2025), section 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.policies._base import Reference
from truedraft.card import Card, knob


@dataclass
class LowConfidence(Reference):
    card = Card(
        paper="arXiv 2502.09992 (2025), section 2.4",
        idea="Fix the position of the block whose predicted token has the largest probability.",
        family="reference",
    )
    tokens: int = knob(1, 1, 1024)  # fixed per pass: positions to fill over steps, as models define it

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        return predictions.fix(predictions.order[: self.tokens])
