"""Sequoia: the tree shape of most tokens per second, by the measured acceptance of the first, second, ... child.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", NeurIPS 2024 (arXiv 2402.12374). The
children of a node are drawn without replacement; how often the child of each rank is accepted does not depend much on
its place in the tree, and is counted as the text goes on. From these rates follows the tree of most expected tokens for
every number of nodes and levels (section 3.1), and the measured costs of passes choose among them (section 3.3). The
paper finds that tree by dynamic programming; since a later child is accepted no more often than an earlier one, it
consists of the places that are the most probable to be reached, which a heap lists in order. `multi-round` verifies the
tree exactly; under `greedy` and `seeded` the children are the likeliest tokens.

It wins over shapes chosen by hand where texts differ in how well they are predicted; trees that follow the draft
model's own probabilities (`opt-tree`, `dyspec`) adapt to each token, where those probabilities are reliable.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._shaped import NodeBudget
from truedraft.drafters._shapes import OfShape
from truedraft.drafters._timed import TimedLevels
from truedraft.stores.memory import Tenants
from truedraft.tree import Accepted, DraftTree, Draws, Row, Scores

NAMESPACES = 1024  # whose rates are kept
PRIOR = (0.6, 0.12, 0.06, 0.03, 0.02, 0.01, 0.01, 0.01)  # acceptance of the children of a node, in order
WEIGHT = 16.0  # of these, in observations
KEPT = 0.98  # weight that an observation keeps at each later one
LEAST = 0.005  # rate that a child is taken to have at least, or nothing would be drafted, and no more be observed
STEP = 0.02  # rates are rounded to it, and replaced once one of them is so far from its value: few shapes are computed

Shape = tuple[tuple[int, ...], ...]


@dataclass
class Ranks:
    """How often the child of each rank was accepted at nodes that had so many children, the nodes being accepted."""

    accepted: list[float] = field(default_factory=lambda: [WEIGHT * rate for rate in PRIOR])
    tried: list[float] = field(default_factory=lambda: [WEIGHT] * len(PRIOR))
    _found: list[float] = field(default_factory=list)  # when `_rates` were taken
    _rates: tuple[float, ...] = ()

    def observe(self, children: int, accepted: int | None) -> None:
        """A node with so many children, of which one was accepted, or none."""
        for rank in range(min(children, len(PRIOR))):
            self.accepted[rank] = KEPT * self.accepted[rank] + (rank == accepted)
            self.tried[rank] = KEPT * self.tried[rank] + 1

    def rates(self) -> tuple[float, ...]:
        """Rounded, and falling from rank to rank, as the order of places takes them to be."""
        found = [accepted / tried for accepted, tried in zip(self.accepted, self.tried, strict=True)]
        if not self._rates or any(abs(now - then) > STEP for now, then in zip(found, self._found, strict=True)):
            self._found = found
            self._rates = tuple(accumulate((max(round(rate / STEP) * STEP, LEAST) for rate in found), min))
        return self._rates


class Place(NamedTuple):
    """A place of a tree. chance: that its node is accepted. parent: its node, 0 the root, n that of the n-th place."""

    chance: float
    parent: int


@dataclass
class Sequoia(OfShape, TimedLevels, NodeBudget):
    card = Card(
        paper="arXiv 2402.12374 (2024)",
        idea="A smaller model drafts the tree shape that measured rates of acceptance and costs make the fastest.",
        family="draft model",
        needs=("draft model",),
        published="Llama 2 7B on an A100: up to 4.04x; Llama 2 70B, offloaded: up to 9.96x, 0.56 s a token.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    nodes: int = knob(24, 1, 128)  # of the draft at most; published 64 to 128, offloaded 768
    length: int = knob(6, 1, 32)  # levels at most; published 7 to 22
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begin()

    def forget(self) -> None:
        super().forget()
        self._begin()

    def _begin(self) -> None:
        self._together = 1  # rows in a pass, which share its seconds
        self._ranks: dict[str, Tenants[Ranks]] = {}  # by what rows prefer to be drafted

    @property
    def draws(self) -> Draws:
        return "distinct"

    def _ranks_of(self, row: Row) -> Ranks:
        kind = self.preferred(row)
        return self._ranks.setdefault(kind, Tenants(NAMESPACES, Ranks)).of(row.namespace)

    def shape_of(self, growing: GrowingTree) -> Sequence[Sequence[int]]:
        if growing.state is None:
            rates = self._ranks_of(growing.row).rates()
            growing.state = shape_for(rates, *self.size(rates, growing.budget, growing.deepest))
        shape: Shape = growing.state
        return shape

    def _grown(self, growing: Sequence[GrowingTree]) -> list[DraftTree]:
        self._together = len(growing)
        return super()._grown(growing)

    def size(self, rates: tuple[float, ...], nodes: int, levels: int) -> tuple[int, int]:
        """The nodes and levels of most tokens per second, up to so many; all where passes have no known cost."""
        if self.pass_cost is None:
            return nodes, levels
        plain, node = self.pass_cost
        goodput, size = 0.0, (1, 1)
        for deep in range(1, levels + 1):
            tokens, seconds = 1.0, (plain + deep * self._of_level) / self._together
            for count, place in enumerate(best_places(rates, self.nodes, deep)[:nodes], 1):
                tokens, seconds = tokens + place.chance, seconds + node
                if tokens > goodput * seconds:
                    goodput, size = tokens / seconds, (count, deep)
                elif place.chance * seconds <= tokens * node:  # later places, of lower chances, only lower it
                    break
        return size

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        for row, tree, reached in zip(rows, trees, accepted, strict=True):
            if tree.drafted:
                children, path = tree.shape.children, reached.path
                for node, child in zip(path, (*path[1:], None), strict=True):
                    if own := children[node]:
                        self._ranks_of(row).observe(len(own), None if child is None else own.index(child))


@lru_cache(maxsize=512)
def shape_for(rates: tuple[float, ...], nodes: int, levels: int) -> Shape:
    """The best tree of so many nodes and levels: by level from the root on, the number of children of each node."""
    children: list[list[int]] = [[] for _ in range(nodes + 1)]
    for node, place in enumerate(best_places(rates, nodes, levels), 1):
        children[place.parent].append(node)
    shape, level = list[tuple[int, ...]](), [0]
    while any(counts := tuple(len(children[node]) for node in level)):
        shape.append(counts)
        level = [child for node in level for child in children[node]]
    return tuple(shape)


@lru_cache(maxsize=512)
def best_places(rates: tuple[float, ...], nodes: int, levels: int) -> list[Place]:
    """The places of a tree of so many levels, those of the highest chances first, a parent before its children: the
    first n of them are the best tree of n nodes. Fewer than `nodes` where there are no more.

    rates: of acceptance, of the children of an accepted node, falling.
    """
    places: list[Place] = []
    heap = [
        (-rates[0], 0, 0, 1, 1.0)
    ]  # minus the chance of a place, its parent, rank and depth, and the parent's chance
    while heap and len(places) < nodes:
        minus, parent, rank, depth, above = heap[0]
        places.append(Place(-minus, parent))
        if rank + 1 < len(rates):
            heapq.heapreplace(heap, (-above * rates[rank + 1], parent, rank + 1, depth, above))
        else:
            heapq.heappop(heap)
        if depth < levels:
            heapq.heappush(heap, (minus * rates[0], len(places), 0, depth + 1, -minus))
    return places
