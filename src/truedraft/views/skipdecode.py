"""Runs the first layers and the last ones, fewer of these the deeper a draft gets.

Del Corro et al., "SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference", 2023
(arXiv 2307.02628). There the number of layers falls linearly along the whole output of models that were tuned for it,
which is lossy; here along a draft of a model as it is, and begins anew after each verification. The first layers warm
up what skips the middle, and the last ones read the keys of tokens before: none runs that these did not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from truedraft.card import Card, knob
from truedraft.errors import Refused
from truedraft.views._base import Reduction, View


@dataclass(frozen=True)
class SkipDecode(View):
    """The ends of a decoder, the upper one shrinking. See `View`.

    Raises:
        Refused: `least` is above `most`.
    """

    card = Card(
        paper="arXiv 2307.02628 (2023)",
        idea="The model drafts for itself with its first and last layers, fewer for each further token of a draft.",
        family="self-drafting",
        published="OPT 1.3B and 6.7B, tuned for it: 2x to 5x fewer operations, lossy.",
        lacks={
            "skipdecode": "the schedule of layers is here, along a draft; the model is not tuned for it, and the depth "
            "does not fall along the whole text",
        },
    )
    warm: int = knob(1, 1, 64)  # first layers, which always run
    most: float = knob(0.75, 0, 1)  # share of the layers that run for a draft's first token, those among them
    least: float = knob(0.25, 0, 1)  # the same `levels` deeper; published by the speed wanted, their mean half for 2x
    levels: int = knob(8, 1, 64)  # of a draft along which the share falls

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise Refused(f"skipdecode:least={self.least} is above most={self.most}: depth falls along a draft")

    def at(self, depth: int) -> Self:
        fallen = (self.most - self.least) * min(depth / self.levels, 1.0)
        return replace(self, most=max(self.most - fallen, self.least))

    def reduction(self, layers: int) -> Reduction:
        if self.warm >= layers:
            raise Refused(f"skipdecode:warm={self.warm}: the decoder has {layers} layers, leave out at least one")
        last = max(round(self.most * layers) - self.warm, 0)
        middle = frozenset(range(self.warm, layers - last))
        return Reduction(middle, middle)
