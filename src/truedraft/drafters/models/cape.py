"""CaPE: a chain of likeliest tokens, with more alternatives beside a token the less sure the draft model is of it.

Du et al., "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding", ICML 2024 (arXiv 2402.02082),
section 3.3, confidence-aware proposal expansion. The draft model decodes a chain; at each of its tokens the next
likeliest ones are verified too, 1 to 7 of them by the probability of the first, and are not continued. It wins where
passes of the draft model are dear beside nodes of the target's pass, since the alternatives cost no pass of the
former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._ranked import RankedGrowth
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.runtime._base import TreeGrowth

UNSURE = ((0.3, 8), (0.6, 6), (0.8, 4), (1.0, 2))  # below a probability of the likeliest token, tokens that are drafted


@dataclass
class Cape(RankedGrowth, ShapedDrafter):
    card = Card(
        paper="arXiv 2402.02082 (2024)",
        idea="A smaller model drafts a chain, with more alternatives where it is less sure.",
        family="draft model",
        needs=("draft model",),
        published="With the draft model of the paper, Vicuna: 2.61x; without such alternatives 2.17x.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(5, 1, 64)  # tokens of the chain; published 5
    most: int = knob(8, 1, 8)  # tokens drafted at one place; published 8
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def width(self) -> int:
        return self.length * self.most

    @property
    def levels(self) -> int:
        return self.length

    @property
    def expansions(self) -> int:
        return self.length

    def most_children(self, growing: GrowingTree) -> int:
        return self.most

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> TreeGrowth:
        return TreeGrowth(children=self.most, width=1, levels=self.length, sure=UNSURE)

    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        (node,), (likely,), (some,) = nodes, tokens, chances
        growing.end_level(growing.add(node, likely[: self._count(some[0]) if some else 0]), 1)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        (node,), (law,) = nodes, laws
        growing.end_level(growing.add(node, self.chosen(growing, node, law, self._count(float(law.max()))))[:1])

    def _count(self, sure: float) -> int:
        """Tokens to draft at a place where the likeliest one has this probability."""
        return min(next((count for below, count in UNSURE if sure < below), UNSURE[-1][1]), self.most)
