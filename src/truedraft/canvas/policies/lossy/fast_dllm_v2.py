"""Fast-dLLM v2: blocks are filled in parts from left to right, each by a threshold.

Every position of the part whose prediction exceeds the threshold is fixed, and always the most confident one. Where
logits are for the next position, the first token of a block is the likeliest one behind the block before it, as in
autoregressive decoding, and is fixed alone.

Wu et al., "Fast-dLLM v2: Efficient Block-Diffusion LLM", arXiv 2509.26328 (2025). Its cache within a block, an
approximation, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow, Fixed, Predictions
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import Card, knob


@dataclass
class FastDllmV2(LossyPolicy):
    card = Card(
        paper="arXiv 2509.26328 (2025)",
        idea="Fill the parts of a block from left to right, each by a threshold.",
        family="threshold",
        published="Up to 2.5 times autoregressive decoding of Qwen 2.5, without loss of quality.",
        lacks={
            "fast-dllm-v2": "the decoding of its models is here; the training that makes one from an autoregressive "
            "model, and the cache of parts of a block, are not",
        },
    )
    threshold: float = knob(0.9, 0, 1)  # which a probability must exceed (0.9)
    part: int = knob(8, 1, 1024)  # positions of a part (8)

    def begin(self, row: CanvasRow, layout: Layout) -> None:
        row.memory[id(self)] = layout.shifted

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        positions, start = predictions.positions, predictions.block.start
        if row.memory[id(self)] and positions[0] == start:
            return frozenset({(start, predictions.likeliest[0])})
        part = (positions[0] - start) // self.part
        order = [i for i in predictions.order if (positions[i] - start) // self.part == part]
        count = sum(predictions.probability[i] > self.threshold for i in order)
        return predictions.fix(order[: max(count, 1)])
