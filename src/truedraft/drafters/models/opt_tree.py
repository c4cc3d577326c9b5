"""OPT-Tree: the tree of a draft model's tokens with the greatest expected acceptance length for a number of nodes.

Wang et al., "OPT-Tree: Speculative Decoding with Adaptive Draft Tree Structure", 2024 (arXiv 2406.17276); the shape
that EAGLE-2 (arXiv 2406.16858) builds too. A node's score is the product of the draft model's probabilities on its
path; the best `beam` of each level are expanded, and the best `nodes` of all are drafted, best first. Nothing is
sampled. A level is the last where it adds less than `gain` to the expected acceptance, or, under the cost control,
where another would cost more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._ranked import LikeliestGrowth
from truedraft.drafters._shaped import NodeBudget
from truedraft.drafters._timed import PayingLevels
from truedraft.runtime._base import TreeGrowth
from truedraft.tree import Accepted, DraftTree, Row, Scores

PUBLISHED = 0.5  # gain


@dataclass
class OptTree(PayingLevels, LikeliestGrowth, NodeBudget):
    card = Card(
        paper="arXiv 2406.17276 (2024)",
        idea="A smaller model's likeliest continuations as a tree, the most promising nodes first.",
        family="draft model",
        needs=("draft model",),
        published="Up to 3.2x; over ten tokens a pass for Llama 2 70B drafted by 7B with large trees.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    nodes: int = knob(24, 1, 1024)  # of the draft; published 60
    beam: int = knob(8, 1, 256)  # nodes expanded at each level; published `nodes`, EAGLE-2 has 10
    length: int = knob(6, 1, 64)  # levels; published 10 at most
    gain: float = knob(0.0, 0, 1e3)  # a level adds to the expected acceptance at least; 0: by costs; published 0.5
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    def __post_init__(self) -> None:
        super().__post_init__()
        self._calibration = Calibration()

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.gain == 0

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        if self.adaptive and self.pass_cost is not None:
            return super().continues(growing, rows, active)
        before, after = growing.state or (0.0, math.inf)
        return after - before >= (self.gain or PUBLISHED)

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> TreeGrowth:
        costs = self.paying(rows) if self.adaptive and self.pass_cost is not None else {"gain": self.gain or PUBLISHED}
        return TreeGrowth(
            children=self.beam, beam=self.beam, width=self.beam, levels=self.length, **{"nodes": self.nodes, **costs}
        )

    def room(self, budget: int) -> int:
        return self.beam * self.length if budget > 0 else 0

    def most_children(self, growing: GrowingTree) -> int:
        return self.beam

    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        _, before = growing.state or (0.0, 0.0)
        growing.end_level(self.add_likeliest(growing, nodes, tokens, chances, self.beam))
        growing.state = before, sum(sorted(growing.score.values(), reverse=True)[: self.nodes])

    def finished(self, growing: GrowingTree) -> DraftTree:
        score = growing.score
        best = sorted(score, key=score.__getitem__, reverse=True)[: min(self.nodes, growing.budget)]
        above = growing.parent
        confidence = [1.0, *[min(score[node] / score.get(above[node], 1.0), 1.0) for node in best]]
        return self._calibration.proposed(growing.row, growing.tree("certain", best, confidence))

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        self._calibration.update(rows)

    def end(self, row: Row) -> None:
        super().end(row)
        self._calibration.end(row)

    def forget(self) -> None:
        super().forget()
        self._calibration = Calibration()
