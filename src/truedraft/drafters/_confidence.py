"""Draft trees of the most probable paths, which end where another level would not pay."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from truedraft.drafters._calibration import Calibration
from truedraft.drafters._candidates import candidates
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._timed import PayingLevels
from truedraft.tree import DraftTree, Draws, Row


class ConfidenceTree(PayingLevels):
    """Dynamic trees (EAGLE-2): nodes in the order of the probability of their paths, by the reader's distributions,
    calibrated.

    Under the cost control a draft ends where another level would not pay, see `PayingLevels`. At each level the
    `expanded` likeliest nodes are expanded, each by its `top_k` likeliest tokens; of all, the `nodes` likeliest are
    drafted. Under `seeded` the probabilities are those by the target's own noise, see `_candidates.candidates`.

    Fields of every subclass: nodes, depth, top_k, drawn.

    drawn: for rules that verify drafts against the distribution that they were drawn from, whether the draft is a chain
        drawn from the reader's.
    """

    _calibration: Calibration

    depth: int
    top_k: int
    drawn: bool

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return not self.drawn

    @property
    def width(self) -> int:
        return max(self.nodes, self.depth)

    @property
    def levels(self) -> int:
        return self.depth

    @property
    def expanded(self) -> int:
        """Nodes that a level expands at most."""
        return self.top_k

    @property
    def draws(self) -> Draws:
        return "one" if self.drawn else "certain"

    def room(self, budget: int) -> int:
        return self.depth * max(self.top_k, budget) if budget > 0 else 0

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        return self.is_drawn(growing.row) or super().continues(growing, rows, active)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        if self.is_drawn(growing.row):
            (node,), (law,) = nodes, laws
            growing.end_level(growing.add(node, self.chosen(growing, node, law), law))
            return
        most, after = min(growing.budget, self.nodes), [growing.depth[node] for node in nodes]
        proposed = [
            (node, token, chance)
            for node, some in zip(
                nodes,
                candidates(self, growing.row, laws, after, min(self.top_k, most), self.vocabulary),
                strict=True,
            )
            for token, chance in some
        ]
        chances = self._calibration.settled(growing.row, (1.0, *(chance for *_, chance in proposed)))[1:]
        children = [
            (growing.score.get(node, 1.0) * settled, node, token, chance)
            for (node, token, chance), settled in zip(proposed, chances, strict=True)
        ]
        least = sorted(growing.score.values(), reverse=True)[most - 1 : most]
        added = []
        for value, node, token, chance in sorted(children, key=lambda child: -child[0])[:most]:
            if not least or value > least[0]:
                (child,) = growing.add(node, [token])
                growing.score[child], growing.chance[child] = value, chance
                added.append(child)
        growing.end_level(added[: self.expanded])

    def is_drawn(self, row: Row) -> bool:
        return self.drawn and self.preferred(row) == "law"

    def finished(self, growing: GrowingTree) -> DraftTree:
        if self.is_drawn(growing.row):
            return growing.tree("one")
        best = sorted(growing.score, key=lambda node: (-growing.score[node], node))[: min(self.nodes, growing.budget)]
        confidence = [1.0, *[growing.chance[node] for node in best]]
        return self._calibration.proposed(growing.row, growing.tree("certain", best, confidence))
