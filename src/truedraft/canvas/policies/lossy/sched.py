"""SchED: all masks are filled at once when the mean gap of logits exceeds a bound that falls smoothly with the steps.

The gap between the two largest logits is averaged over all masked positions, of later blocks too; the paper averages
over the filled ones as well. The bound falls linearly, as a cosine or exponentially.

Mohamed et al., "Fast-Decoding Diffusion Language Models via Progress-Aware Confidence Schedules" (SchED),
arXiv 2512.02892 (2025). Its bounds are to be tuned for a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, exp, pi
from statistics import fmean

from truedraft.canvas._base import Predictions
from truedraft.canvas.policies.lossy._early_exit import EarlyExit
from truedraft.card import Card, knob

FALLS = ("linear", "cosine", "exponential")


def fall(name: str) -> str:
    """The name of a form of the fall; raises ValueError for others."""
    if name not in FALLS:
        raise ValueError
    return name


@dataclass
class Sched(EarlyExit):
    card = Card(
        paper="arXiv 2512.02892 (2025)",
        idea="Fill all masks at once when the gap of logits exceeds a bound that falls smoothly with the steps.",
        family="early exit",
        presets={"sched-linear": {"form": "linear"}, "sched-cosine": {"form": "cosine"}},
        published="Instruction-tuned Dream and LLaDA: 3.8 to 4.0 times at 99.8 to 100% of the score.",
    )
    high: float = knob(7.5, 0, 1000)  # bound of the mean gap of logits at the first step (7.5)
    low: float = knob(0.0, 0, 1000)  # at the last step; of an exponential, in the limit (0 to 2.5)
    form: str = knob("exponential", form="linear, cosine or exponential", reader=fall)  # of the fall
    rate: float = knob(4.0, 0, 64)  # of an exponential fall (2 to 16)

    def sure(self, predictions: Predictions, progress: float) -> bool:
        return fmean(predictions.margin) >= self.low + (self.high - self.low) * self._left(progress)

    def _left(self, progress: float) -> float:
        """How much of the fall is left, from 1 to 0."""
        if self.form == "exponential":
            return exp(-self.rate * progress)
        return 1 - progress if self.form == "linear" else (1 + cos(pi * progress)) / 2
