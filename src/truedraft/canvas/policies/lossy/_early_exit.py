"""One position at a time until the model is sure of all the rest, which is then fixed at once."""

from __future__ import annotations

from abc import abstractmethod

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy


class EarlyExit(LossyPolicy):
    """A policy that ends step-by-step decoding early.

    With attention to the whole the rest is all that is masked, also in later blocks. With attention in blocks it is
    that of the block, since later ones are not predicted before it is full.
    """

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        row.memory[id(self)] = layout.attention == "whole"

    def reach(self, row: CanvasRow) -> int:
        return len(row.blocks) - 1 if row.memory[id(self)] else row.at

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        span = range(row.prompt if row.memory[id(self)] else max(row.prompt, row.block.start), row.span(row.block).stop)
        progress = (len(span) - len(predictions) + 1) / len(span)
        return predictions.fix(predictions.order if self.sure(predictions, progress) else predictions.inside[:1])

    @abstractmethod
    def sure(self, predictions: Predictions, progress: float) -> bool:
        """Whether the rest is fixed at once.

        Args:
            progress: steps so far, this one included, by the positions to fill: above 0, up to 1.
        """
