"""APD: from left to right, as many predictions at a time as a small causal model would choose too.

Each pass predicts a token at each of the next masks. A guide, a small causal model, reads them in one forward. At each
place its law given the predictions before, p_A, is mixed with the diffusion model's, p_D: the product of experts
p_D^R p_A^(1-R), of which a token is chosen with the noise that chose the prediction (universal coupling; greedily both
are the likeliest tokens). The first prediction is fixed, as the diffusion model alone predicts it, and behind it the
longest run of predictions that are chosen again.

The released code adds logits instead of log-probabilities, which differ by a constant that changes no law, and chooses
again without noise: its drawn predictions are compared with the likeliest tokens of the mixture. It also keeps keys and
values of tokens further back than a window, an approximation that is not made here, and cuts off what stands behind the
next masks; here the canvas is read whole. With attention in blocks later ones are not predicted, and the next masks are
those of the block.

Israel, Van den Broeck and Grover, "Accelerating Diffusion LLMs via Adaptive Parallel Decoding" (APD), arXiv 2506.00413
(2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._guide import Guided
from truedraft.card import Card, knob


@dataclass
class Apd(Guided):
    card = Card(
        paper="arXiv 2506.00413 (2025)",
        idea="Fix the longest run of predictions that a mixture with a small causal model chooses too.",
        family="guide",
        needs=("guide",),
        published="Markedly higher throughput of Dream 7B, with a guide of 0.5 B, at a small loss of quality.",
        lacks={
            "apd": "the mixture with a causal model is as published; the keys and values that are kept and the suffix "
            "that is cut, from which its speed comes, are not here",
        },
    )
    model: Any = None  # the guide: a causal model of the same tokenizer, or its name
    weight: float = knob(0.7, 0, 1)  # R, of the diffusion model (0.7)
    ahead: int = knob(100, 1, 4096)  # M, most masks that are predicted at a time (100)

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        row.memory[id(self)] = layout.attention == "whole"

    def reach(self, row: CanvasRow) -> int:
        if not row.memory[id(self)]:
            return row.at
        last = row.canvas.masked(row.block)[0] + self.ahead - 1
        return max(i for i, block in enumerate(row.blocks) if block.start <= last)

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        assert predictions.again is not None
        first, draft = predictions.positions[0], predictions.tokens[: self.ahead]
        guide = self.scores(row, [*row.canvas.tokens[:first], *draft], first, predictions.scores.shape[-1])
        own = predictions.scores[: len(draft)]
        mixed = self.weight * own + (1 - self.weight) * guide.to(own.device)
        chosen = predictions.again(mixed)
        differs = (i for i, (one, other) in enumerate(zip(draft, chosen, strict=True)) if i and one != other)
        return predictions.fix(range(next(differs, len(draft))))
