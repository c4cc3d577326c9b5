"""ReDiff's decoding: each step fills a fixed number of masks, and rewrites tokens of which the model has become sure of
others.

Every pass fills the most confident masks of the block and replaces those of its tokens whose likeliest one is another
with a high probability; then passes over the full block follow, so many at most, until nothing is replaced. The method
trains a vision-language model to correct its own mistakes, which is not done here, and models that have not learnt it
mostly confirm what they read. The threshold and the number of passes are this project's, to be tuned for a model.

Ji et al., "From Denoising to Refining: A Corrective Framework for Vision-Language Diffusion Model" (ReDiff),
arXiv 2510.19871 (2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.canvas._base import Predictions
from truedraft.canvas.policies.lossy._editing import Editing
from truedraft.card import Card, knob


@dataclass
class Rediff(Editing):
    card = Card(
        paper="arXiv 2510.19871 (2025)",
        idea="Fill a fixed number of masks per step, and rewrite tokens that the model has become sure are others.",
        family="editing",
        published="More coherent and accurate captions than without rewriting at several tokens per step, by a model "
        "trained for it; no factor.",
        lacks={
            "rediff": "the loop that fills and rewrites is here; both stages of its training, without which a model "
            "rewrites badly, are not",
        },
    )
    tokens: int = knob(4, 1, 1024)  # masks that a pass fills
    sure: float = knob(0.9, 0, 1)  # which the probability of another token must exceed
    refine: int = knob(1, 0, 1024)  # most passes over a block without masks

    @property
    def surer_than(self) -> float:
        return self.sure

    @property
    def again(self) -> int:
        return self.refine

    def fill(self, masked: Sequence[int], predictions: Predictions) -> Sequence[int]:
        return masked[: self.tokens]
