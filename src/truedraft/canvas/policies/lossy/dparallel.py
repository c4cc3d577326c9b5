"""dParallel's decoding: every position whose prediction has a low entropy is fixed.

The other half of the method trains a model to be certain of many positions at once, which is not done here.

Chen et al., "dParallel: Learnable Parallel Decoding for dLLMs", arXiv 2509.26488 (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import Card, knob


@dataclass
class Dparallel(LossyPolicy):
    card = Card(
        paper="arXiv 2509.26488 (2025)",
        idea="Fix every position whose prediction has an entropy below a threshold.",
        family="threshold",
        presets={"dparallel-dream": {"entropy": 0.5}},
        published="LLaDA 8B trained for it: 256 to 30 steps on GSM8K (8.5 times), 256 to 24 on MBPP (10.5 times).",
    )
    entropy: float = knob(0.45, 0, 64)  # most nats of a prediction (0.45 for LLaDA, 0.5 for Dream)

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        entropy = predictions.entropy
        found = [i for i, nats in enumerate(entropy) if nats <= self.entropy]
        return predictions.fix(found or [min(range(len(entropy)), key=entropy.__getitem__)])
