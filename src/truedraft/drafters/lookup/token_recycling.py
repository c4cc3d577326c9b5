"""Token Recycling: draft a tree from the target's last top candidates after each token.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", 2024
(arXiv 2408.08696). For every token the eight likeliest successors in the target's last pass over it, at rejected nodes
too, are kept across requests of a namespace. With one token of context it drafts a little on any text; where text
repeats, copying drafts more.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import root_of
from truedraft.stores.memory import Tenants
from truedraft.stores.successors import Successors, Template
from truedraft.tree import Accepted, DraftTree, Row, Scores

# probability that the first, second, ... successor is right: a prior, which also shapes the tree
RANKS = (0.45, 0.14, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)


@dataclass
class TokenRecycling(PerRow[Successors]):
    card = Card(
        paper="arXiv 2408.08696 (2024)",
        idea="Draft a tree from the successors that the target itself last found likeliest after each token.",
        family="recycling",
        published="Spec-Bench, Vicuna 7B-33B: about 2x (7B 2.09x; EAGLE-2 2.28x).",
    )
    nodes: int = knob(80, 1, 1024)  # of the tree; published 80
    depth: int = knob(6, 1, 64)  # of the tree; published 6
    successors: int = knob(8, 1, 16)  # kept for each token; published 8
    namespaces: int = knob(64, 1, 65_536)  # kept, least recently used evicted first; published: one for all

    def forget(self) -> None:
        super().forget()
        self._seen = Tenants(self.namespaces, lambda: Successors(self.successors), lambda seen: seen.nbytes)

    @property
    def width(self) -> int:
        return self.nodes

    def begin(self, row: Row) -> Successors:
        return self._seen.of(row.namespace)

    def draft(self, row: Row, state: Successors, after: Sequence[int], budget: int) -> DraftTree:
        shape = template(self.nodes, self.depth, min(self.successors, len(RANKS)))
        tokens, parents, confidence = state.tree(root_of(row, after), budget, shape)
        return DraftTree(tokens, parents, confidence=confidence)

    def learn(self, row: Row, state: Successors, tree: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        state.learn(tree.tokens, logits)

    def learn_all(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        state = self._states[id(rows[0])]
        if all(self._states[id(row)] is state for row in rows):  # of one namespace
            state.learn_pass(trees, scores)
        else:
            super().learn_all(rows, trees, scores, accepted)


@lru_cache(maxsize=64)
def template(nodes: int, depth: int, successors: int) -> Template:
    """The published shape, the likeliest paths first."""
    heap = [(-RANKS[rank], 1, 0, rank) for rank in range(successors)]
    heapq.heapify(heap)
    made: list[tuple[int, int]] = []
    while heap and len(made) < nodes:
        value, level, parent, rank = heapq.heappop(heap)
        made.append((parent, rank))
        if level < depth:
            for below in range(successors):
                heapq.heappush(heap, (value * RANKS[below], level + 1, len(made), below))
    parents, ranks = zip(*made, strict=True)
    return Template(array("i", parents), array("i", ranks), array("d", [RANKS[rank] for rank in ranks]))
