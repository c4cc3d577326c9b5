"""CreditDecoding: tokens that were predicted for several steps gain confidence.

At every step each masked position credits its likeliest token with a power of its probability, and older credits decay.
The logits are raised by the logarithm of the credits, and positions whose prediction then reaches a threshold are
fixed. Credits begin anew with each block.

Wang et al., "CreditDecoding", arXiv 2510.06133 (2025), section 4, with the constants of its code in dInfer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log1p

import torch

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import Card, knob

Credits = dict[int, dict[int, float]]  # position -> token -> credit


@dataclass
class Creditdecoding(LossyPolicy):
    card = Card(
        paper="arXiv 2510.06133 (2025)",
        idea="Raise the confidence of tokens that were predicted for several steps.",
        family="history",
        published="5.48 times LLaDA 8B (+0.48 points), 4.11 times LLaDA-MoE (+0.15), over eight benchmarks.",
    )
    threshold: float = knob(0.9, 0, 1)  # least probability after credits (0.9)
    weight: float = knob(0.7, 0, 64)  # of the logarithm of credits, alpha (0.7)
    power: float = knob(0.2, 0, 64)  # of a probability, gamma (0.2)
    decay: float = knob(0.8, 0, 1)  # of credits at each step, beta (0.8)

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        credits: Credits = row.memory.get(id(self), {})
        row.memory[id(self)] = credits = {
            place: {token: self.decay * credit for token, credit in credits.get(place, {}).items()}
            for place in predictions.positions
        }
        raised = predictions.scores.clone()
        for i, (place, token) in enumerate(zip(predictions.positions, predictions.likeliest, strict=True)):
            gained = exp(self.power * float(predictions.scores[i, token]))
            credits[place][token] = credits[place].get(token, 0.0) + gained
            for credited, credit in credits[place].items():
                raised[i, credited] += self.weight * log1p(credit)
        laws = torch.softmax(raised, -1)
        if predictions.drawn is None:
            tokens = laws.masked_fill(predictions.logits == -torch.inf, 0).argmax(-1).tolist()
        else:
            tokens = list(predictions.tokens)
        sure = [float(laws[i, token]) for i, token in enumerate(tokens)]
        found = [i for i, p in enumerate(sure) if p >= self.threshold] or [max(range(len(sure)), key=sure.__getitem__)]
        return frozenset((predictions.positions[i], tokens[i]) for i in found)
