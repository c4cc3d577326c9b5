"""D2F: several blocks are filled at a time, each beginning when the one before it has begun to fill.

Every position of these blocks whose prediction exceeds a threshold is fixed. A block of which the one before is almost
full has at least one position fixed per pass. The method also trains a model for it, which is not done here: its later
blocks are predicted behind masks, as other models have not learnt.

Wang et al., "Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing" (D2F), arXiv 2508.09192
(2025), section 4, with the constants of its code.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import Card, knob
from truedraft.errors import Refused


@dataclass
class D2f(LossyPolicy):
    card = Card(
        paper="arXiv 2508.09192 (2025)",
        idea="Fill several blocks at a time, each beginning while the one before it is filled.",
        family="pipeline",
        cannot={"attention to the whole": "its blocks read earlier ones only"},
        published="LLaDA 8B trained for it: 7.2 to 52.5 tokens/s on GSM8K (77.4 to 77.3), 0.9 to 47.6 on MBPP.",
        lacks={
            "d2f": "the pipeline of blocks is here; the training by discrete diffusion forcing, for which it is made, "
            "is not",
        },
    )
    threshold: float = knob(0.9, 0, 1)  # which a probability must exceed (0.9)
    add: float = knob(0.1, 0, 1)  # least known share of the last block before another is added (0.1 to 0.9)
    active: float = knob(0.95, 0, 1)  # least known share of a block before the next one never waits (0.95)

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        if layout.attention == "whole":
            raise Refused(
                "lossy/d2f fills blocks that read earlier ones only, and this model attends to the whole canvas: "
                "choose lossy/ete for several blocks at a time"
            )

    def reach(self, row: CanvasRow) -> int:
        last = max(row.reach, row.at)
        more = last + 1 < len(row.blocks) and row.ends.isdisjoint(row.canvas.tokens[row.prompt :])
        return last + (more and self._known(row, last) >= self.add)

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        found: list[int] = []
        for at in range(row.at, max(row.reach, row.at) + 1):
            order = [i for i in predictions.order if predictions.positions[i] in row.blocks[at]]
            count = sum(predictions.probability[i] > self.threshold for i in order)
            waits = at > row.at and self._known(row, at - 1) < self.active
            found += order[: count if waits else max(count, 1)]
        return predictions.fix(found)

    def _known(self, row: CanvasRow, at: int) -> float:
        """The known share of a block; what stands before the end of the prompt is known."""
        block = row.blocks[at]
        return 1 - len(row.canvas.masked(block)) / len(block)
