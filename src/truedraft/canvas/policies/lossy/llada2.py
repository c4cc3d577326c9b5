"""LLaDA 2: every position whose prediction exceeds a threshold, if they are enough, else the most confident ones; 2.1
goes over the tokens of a block again.

A token of the block being filled is replaced by another whose probability exceeds a second threshold, and a block
without masks is read again until nothing is replaced, so often at most. Without editing (`editing_threshold=0`) what is
written stays, which is the rule of LLaDA 2.0; models that have not been trained to edit gain little by it.

Bie et al., "LLaDA2.0", arXiv 2512.15745 (2025), and "LLaDA2.1", arXiv 2602.08676 (2026), with the constants of the code
of the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.policies.lossy._editing import Editing
from truedraft.card import Card, knob


@dataclass
class Llada2(Editing):
    card = Card(
        paper="arXiv 2512.15745 (2025), 2602.08676 (2026)",
        idea="Fix every position above a threshold, and replace tokens of which the model has become sure of others.",
        family="editing",
        presets={"llada2-without-edits": {"editing_threshold": 0.0}},
    )
    threshold: float = knob(0.95, 0, 1)  # which a probability must exceed (0.95)
    least: int = knob(1, 1, 1024)  # positions per pass, where so many are masked (1)
    editing_threshold: float = knob(0.9, 0, 1)  # which that of another token must exceed (0.9); 0: none is replaced
    max_post_steps: int = knob(16, 0, 1024)  # most passes over a block without masks (16)

    @property
    def surer_than(self) -> float:
        return self.editing_threshold

    @property
    def again(self) -> int:
        return self.max_post_steps

    def fill(self, masked: Sequence[int], predictions: Predictions) -> Sequence[int]:
        count = sum(predictions.probability[i] > self.threshold for i in masked)
        return masked[: max(count, self.least)]

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        if not self.editing_threshold:
            return predictions.fix(self.fill(predictions.order, predictions))
        return super().choose(predictions, row)
