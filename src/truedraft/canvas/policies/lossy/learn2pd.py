"""Learn2PD: a filter, trained on traces of step-by-step decoding, tells which predictions are final.

It is a perceptron over the confidences of the block's positions. Those that it accepts are fixed, and always the most
confident one. Known positions count as certain; the paper takes the model's prediction there as well.

End-of-text prediction, a knob: where the likeliest token at a masked position is an end token, however little so, the
text ends there, at the most confident of these positions, or at the first end token that the step fixes. The published
code cuts off what is behind; here it is filled with the end token, which the model still attends to where it attends to
the whole canvas. With attention in blocks only positions of the current block are predicted.

Bao et al., "Learning to Parallel" (Learn2PD), arXiv 2509.25188 (2025), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from truedraft.canvas._base import NOTHING, CanvasRow, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.canvas.policies.lossy._filter import MAKER, Filter, confidences
from truedraft.card import Card, knob, shown
from truedraft.errors import Refused
from truedraft.runtime.finite import check_finite


@dataclass
class Learn2pd(LossyPolicy):
    card = Card(
        paper="arXiv 2509.25188 (2025)",
        idea="Fix the positions whose prediction a small trained filter takes for final.",
        family="trained",
        needs=("training",),
        published="LLaDA 8B: up to 22.58 times on GSM8K with 1,024 tokens, 57.51 times with a cache; much of it by "
        "ending texts early.",
    )
    model: Any = None  # file of a trained filter, or a Filter
    threshold: float = knob(0.96, 0, 1)  # which the filter's probability must exceed (0.96)
    ends: bool = knob(False)  # end-of-text prediction: the text ends where an end token is predicted (on)

    def bind(self, vocabulary: int, layout: Layout, tokenizer: Any) -> None:
        check_finite("lossy/learn2pd", self.model, self.filter)

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        row.memory[id(self)] = layout.attention
        longest = max(map(len, row.blocks))
        if longest > self.filter.block:
            raise Refused(
                f"lossy/learn2pd: its filter reads blocks of up to {self.filter.block} positions, and there are "
                f"{longest}: give a smaller block_length, or train a filter for these"
            )

    @cached_property
    def filter(self) -> Filter:
        """Raises Refused where there is none, or its file cannot be read."""
        if isinstance(self.model, Filter):
            return self.model
        if not isinstance(self.model, str | PathLike):
            raise Refused(
                f"lossy/learn2pd:model={shown(self.model)}: give the file of a trained filter (`{MAKER}` makes one)"
            )
        return Filter.read(Path(self.model))

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        with torch.no_grad():
            final = torch.sigmoid(self.filter(confidences(predictions, self.filter.block))).tolist()
        start, best = predictions.block.start, predictions.inside[0]
        accepted = {i for i in predictions.inside if final[predictions.positions[i] - start] > self.threshold}
        fixed = predictions.fix(sorted(accepted | {best}))
        return fixed | _ended(fixed, predictions, row) if self.ends else fixed

    def reach(self, row: CanvasRow) -> int:
        return len(row.blocks) - 1 if self.ends and row.memory.get(id(self)) == "whole" else row.at


def _ended(fixed: Fixed, predictions: Predictions, row: CanvasRow) -> Fixed:
    """End tokens at the masked positions from a predicted end of the text on; none where no end is predicted."""
    chosen = dict(fixed)
    found = min(((place, token) for place, token in fixed if token in row.ends), default=None)
    if found is None:
        ends = [i for i in predictions.order if predictions.tokens[i] in row.ends]
        if not ends:
            return NOTHING
        found = predictions.positions[ends[0]], predictions.tokens[ends[0]]
    rest = range(found[0], row.blocks[-1].stop)
    return frozenset((i, found[1]) for i in rest if not row.canvas.known[i] and i not in chosen)
