"""DySpec: a tree of sampled tokens that grows where the draft model expects acceptance, as the text requires it.

Xiong et al., "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure", 2024 (arXiv 2410.11744). The
value of a place in the tree is the probability that verification reaches it, if acceptance is as probable as the draft
model's tokens are. Siblings are drawn without replacement: below a node of value v, the value of the next place is v
times the probability that is left for it, and the node that fills it has v times the probability of its token. Places
are filled in the order of their values (algorithm 1 of the paper); a pass of the draft model reads the `beam` nodes
whose first places are the most valuable, and places of lower value than these wait for it. Whether a place is filled
is decided before its token is drawn, so that `multi-round` verifies the tree exactly. Under `greedy` and `seeded` the
siblings are the likeliest tokens instead.

It wins over trees of fixed shape where the draft model is sure of some tokens and unsure of others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._ranked import RankedGrowth
from truedraft.drafters._shaped import NodeBudget
from truedraft.runtime._base import TreeGrowth
from truedraft.stores.likeliest import MOST
from truedraft.tree import Draws


@dataclass
class Places:
    """The places of a tree that may be filled.

    values: heap of (minus the value of the place for a further child, its node).
    left: node -> what is left of its distribution for further children, where these are drawn.
    siblings: node -> its other children and their probabilities, where these are known, the next one last.
    rest: node -> the probability that is left for these.
    """

    values: list[tuple[float, int]] = field(default_factory=list)
    left: dict[int, Tensor] = field(default_factory=dict)
    siblings: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    rest: dict[int, float] = field(default_factory=dict)


@dataclass
class DySpec(RankedGrowth, NodeBudget):
    card = Card(
        paper="arXiv 2410.11744 (2024)",
        idea="A smaller model samples a tree whose shape follows the probability of its tokens.",
        family="draft model",
        needs=("draft model",),
        published="Llama 2 70B, offloaded: up to 9.1x throughput at low temperature, 6.21x at high.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    nodes: int = knob(24, 1, 1024)  # of the draft; published 64, offloaded 768 to 1024
    length: int = knob(8, 1, 64)  # levels, and passes of the draft model
    beam: int = knob(4, 1, 256)  # nodes that a pass reads; published 1, with a threshold a whole level
    threshold: float = knob(0.0, 0, 1)  # least value of a place that is filled; published: near 1 / nodes, by levels
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def draws(self) -> Draws:
        return "distinct"

    @property
    def expansions(self) -> int:
        return self.length * self.beam

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> TreeGrowth:
        return TreeGrowth(
            children=self.most_children(growing[0]), width=self.beam, levels=self.length, places=True,
            threshold=self.threshold,
        )  # fmt: skip

    def most_children(self, growing: GrowingTree) -> int:
        return min(self.nodes, MOST)

    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        growing.state = places = growing.state or Places()
        for node, some, likely in zip(nodes, tokens, chances, strict=True):
            places.siblings[node], places.rest[node] = [*zip(some, likely, strict=True)][::-1], 1.0
            heapq.heappush(places.values, (-growing.score.get(node, 1.0), node))
        self._fill_places(growing, places)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        if self.preferred(growing.row) != "law":
            most = self.most_children(growing)
            tokens = [self.chosen(growing, node, law, most) for node, law in zip(nodes, laws, strict=True)]
            chances = [law[some].tolist() for law, some in zip(laws, tokens, strict=True)]
            return self.grow_ranked(growing, nodes, tokens, chances)
        growing.state = places = growing.state or Places()
        for node, law in zip(nodes, laws, strict=True):
            if law.any():
                places.left[node] = growing.laws[node] = law
                heapq.heappush(places.values, (-growing.score.get(node, 1.0), node))
        self._fill_places(growing, places)

    def _fill_places(self, growing: GrowingTree, places: Places) -> None:
        """Fill the places that are worth more than a pass over the next level may find, and end the level."""
        last = growing.passes + 1 == self.length
        unread = [-growing.score[node] for node in growing.score if self._continues(growing, node)]
        heapq.heapify(unread)
        while places.values and growing.room > 0:
            value = -places.values[0][0]
            if value < self.threshold or (unread and value < -unread[0] and not last):
                break
            child = self._fill(growing, places)
            if child is not None and self._continues(growing, child):
                heapq.heappush(unread, -growing.score[child])
        ready = sorted(
            (node for node in growing.score if self._continues(growing, node)), key=lambda node: -growing.score[node]
        )
        growing.end_level([] if last else [node for node in ready if growing.score[node] > self.threshold][: self.beam])

    @staticmethod
    def _continues(growing: GrowingTree, node: int) -> bool:
        """Whether a node may be read."""
        deep, ends = growing.depth[node] >= growing.deepest, growing.tokens[node] in growing.row.ends
        return node not in growing.expanded and not deep and not ends

    def _fill(self, growing: GrowingTree, places: Places) -> int | None:
        """Fill the most valuable place; returns its node, None where no token is left for it."""
        _, parent = heapq.heappop(places.values)
        if parent in places.left:
            token, chance, rest = self._drawn(growing, places, parent)
        elif siblings := places.siblings[parent]:
            token, chance = siblings.pop()
            rest = places.rest[parent] = places.rest[parent] - chance
        else:
            return None
        (child,) = growing.add(parent, [token])
        value = growing.score.get(parent, 1.0)
        growing.score[child] = value * chance
        if rest > 0:
            heapq.heappush(places.values, (-value * rest, parent))
        return child

    def _drawn(self, growing: GrowingTree, places: Places, parent: int) -> tuple[int, float, float]:
        """A child that is drawn, its probability, and what is left then."""
        left = places.left[parent]
        (token,) = growing.row.request.chance.draw(left, growing.row)
        chance = float(left[token])
        places.left[parent] = left = left.clone()
        left[token] = 0.0
        return token, chance, float(left.sum())
