"""Stochastic beam: a draft model's tree of sequences sampled without replacement.

RSD-S of Jeon et al., "Recursive Speculative Decoding", 2024 (arXiv 2402.14160), section 3.2.2, by the stochastic beam
search of Kool et al., ICML 2019. Each continuation arrives after a waiting time, exponential with its probability as
rate; the first `beam` arrivals of a level are kept. (-log of such a time is the perturbed log-probability of those
papers, and a node's first child arrives when the node did.) Whether one more sibling arrives in time is decided before
its token is drawn, so that recursive rejection (`multi-round`) stays exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._ranked import LikeliestGrowth
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.runtime._base import TreeGrowth
from truedraft.tree import Draws


@dataclass
class StochasticBeam(LikeliestGrowth, ShapedDrafter):
    card = Card(
        paper="arXiv 2402.14160 (2024)",
        idea="A smaller model samples a few sequences without replacement, by stochastic beam search.",
        family="draft model",
        needs=("draft model",),
        published="RSD-S, Llama 2 70B drafted by 115M: the highest block efficiency of the trees compared.",
        also={
            "rsd-s": "",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    beam: int = knob(4, 1, 64)  # sequences kept at each level; published 2 to 6
    length: int = knob(5, 1, 64)  # levels; published 2 to 5
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def width(self) -> int:
        return self.beam * self.length

    @property
    def levels(self) -> int:
        return self.length

    @property
    def draws(self) -> Draws:
        return "distinct"

    def most_children(self, growing: GrowingTree) -> int:
        return self.beam

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> TreeGrowth:
        return TreeGrowth(children=self.beam, beam=self.beam, width=self.beam, levels=self.length)

    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        growing.end_level(self.add_likeliest(growing, nodes, tokens, chances, self.beam))

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        if self.preferred(growing.row) != "law":
            return super().grow(growing, nodes, laws)
        chance = growing.row.request.chance
        rate = {node: growing.score.get(node, 1.0) for node in nodes}  # probability of the path
        left = dict(zip(nodes, laws, strict=True))
        arrivals = [(growing.arrival.get(node, 0.0), node) for node, law in left.items() if law.any()]
        heapq.heapify(arrivals)
        added: list[int] = []
        while arrivals and len(added) < self.beam and growing.room > 0:
            time, node = heapq.heappop(arrivals)
            law = laws[nodes.index(node)]
            (token,) = chance.draw(left[node], growing.row)
            (child,) = growing.add(node, [token], law)
            growing.score[child], growing.arrival[child] = rate[node] * float(law[token]), time
            added.append(child)
            left[node] = left[node].clone()
            left[node][token] = 0.0
            if (rest := float(left[node].sum())) > 0:
                heapq.heappush(arrivals, (time + chance.wait(growing.row) / (rate[node] * rest), node))
        growing.end_level(added)
