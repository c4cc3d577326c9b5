"""Left to right, one position per pass: the first masked position of the block is fixed.

In blocks of one position that is autoregressive decoding.

Cheng et al., "SDAR: A Synergistic Diffusion-AutoRegression Paradigm", arXiv 2510.06303 (2025): `sequential`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.policies._base import Reference
from truedraft.card import Card, knob


@dataclass
class LeftToRight(Reference):
    card = Card(
        paper="arXiv 2510.06303 (2025)",
        idea="Fix the first masked position of the block.",
        family="reference",
    )
    ordered: ClassVar[bool] = True
    tokens: int = knob(1, 1, 1024)  # fixed per pass: positions to fill over steps, as models define it

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        return predictions.fix(range(min(self.tokens, len(predictions))))
