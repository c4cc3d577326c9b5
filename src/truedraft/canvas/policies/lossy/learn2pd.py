"""Learn2PD: a filter, trained on traces of step-by-step decoding, tells which predictions are final.

It is a perceptron over the confidences of the block's positions. Those that it accepts are fixed, and always the most
confident one. Known positions count as certain; the paper takes the model's prediction there as well. The paper also
ends a text where an end token is predicted in the masked rest; here it ends as under any policy.

Bao et al., "Learning to Parallel" (Learn2PD), arXiv 2509.25188 (2025), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.canvas.policies.lossy._filter import MAKER, Filter, confidences
from truedraft.card import Card, knob, shown
from truedraft.errors import Refused


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

    def begin(self, row: CanvasRow, layout: Layout) -> None:
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
        start, best = predictions.block.start, predictions.order[0]
        accepted = {i for i, place in enumerate(predictions.positions) if final[place - start] > self.threshold}
        return predictions.fix(sorted(accepted | {best}))
