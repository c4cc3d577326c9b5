"""Sequoia: the tree shape of most tokens per second, by the measured acceptance of the first, second, ... child.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", NeurIPS 2024 (arXiv 2402.12374). The
children of a node are drawn without replacement; how often the child of each rank is accepted does not depend much on
its place in the tree, and is counted as the text goes on. From these rates dynamic programming finds the tree of most
expected tokens for every number of nodes and levels (section 3.1), and the measured costs of passes choose among them
(section 3.3). `multi-round` verifies the tree exactly; under `greedy` and `seeded` the children are the likeliest
tokens.

It wins over shapes chosen by hand where texts differ in how well they are predicted; trees that follow the draft
model's own probabilities (`opt-tree`, `dyspec`) adapt to each token, where those probabilities are reliable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

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
STEP = 0.02  # rates are rounded to it, so that few shapes are computed

Shape = tuple[tuple[int, ...], ...]


@dataclass
class Ranks:
    """How often the child of each rank was accepted at nodes that had so many children, the nodes being accepted."""

    accepted: list[float] = field(default_factory=lambda: [WEIGHT * rate for rate in PRIOR])
    tried: list[float] = field(default_factory=lambda: [WEIGHT] * len(PRIOR))

    def observe(self, children: int, accepted: int | None) -> None:
        """A node with so many children, of which one was accepted, or none."""
        for rank in range(min(children, len(PRIOR))):
            self.accepted[rank] = KEPT * self.accepted[rank] + (rank == accepted)
            self.tried[rank] = KEPT * self.tried[rank] + 1

    def rates(self) -> tuple[float, ...]:
        """Rounded, and falling from rank to rank, as the allocation of nodes takes them to be."""
        found: list[float] = []
        for accepted, tried in zip(self.accepted, self.tried, strict=True):
            rate = max(round(accepted / tried / STEP) * STEP, LEAST)
            found.append(min([rate, *found[-1:]]))
        return tuple(found)


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

    def size(self, rates: tuple[float, ...], nodes: int, levels: int) -> tuple[int, int]:
        """The nodes and levels of most tokens per second, up to so many; all where passes have no known cost."""
        if self.pass_cost is None:
            return nodes, levels
        plain, node = self.pass_cost
        gains = expected(rates, self.nodes, self.length)
        sizes = [(n, d) for d in range(1, levels + 1) for n in range(d, nodes + 1)]
        return max(
            sizes, key=lambda size: (1 + gains[size[1]][size[0]]) / (plain + size[0] * node + size[1] * self._of_level)
        )

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


@lru_cache(maxsize=64)
def expected(rates: tuple[float, ...], nodes: int, levels: int) -> list[list[float]]:
    """By levels and nodes, the expected accepted nodes of the best tree of that size."""
    return [gains for gains, _ in _tables(rates, nodes, levels)]


@lru_cache(maxsize=512)
def shape_for(rates: tuple[float, ...], nodes: int, levels: int) -> Shape:
    """The best tree of so many nodes and levels: by level from the root on, the number of children of each node."""
    tables = _tables(rates, nodes, levels)
    shape: list[tuple[int, ...]] = []
    below = [nodes]  # nodes below each node of the level
    for level in range(levels, 0, -1):
        parts = [_parts(tables[level][1], own) for own in below]
        shape.append(tuple(map(len, parts)))
        below = [size for some in parts for size in some]
        if not any(below):
            break
    return tuple(shape)


def _parts(choices: Sequence[Sequence[int]], nodes: int) -> list[int]:
    """The nodes below each child of a node that has so many below it."""
    parts: list[int] = []
    for of_rank in choices:
        if nodes == 0 or of_rank[nodes] < 0:
            break
        parts.append(of_rank[nodes])
        nodes -= 1 + of_rank[nodes]
    return parts


@lru_cache(maxsize=64)
def _tables(rates: tuple[float, ...], nodes: int, levels: int) -> list[tuple[list[float], list[list[int]]]]:
    """By levels, from 0 on: the most expected accepted nodes below an accepted node that has 0, 1, ... nodes below it;
    and by rank of a child and nodes left for it and its later siblings, how many are below it, -1 for no child."""
    tables: list[tuple[list[float], list[list[int]]]] = [([0.0] * (nodes + 1), [])]
    for _ in range(levels):
        below = tables[-1][0]
        later, choices = [0.0] * (nodes + 1), list[list[int]]()
        for rate in reversed(rates):
            gains, chosen = [0.0] * (nodes + 1), [-1] * (nodes + 1)
            for left in range(1, nodes + 1):
                for own in range(left):
                    gain = rate * (1 + below[own]) + later[left - 1 - own]
                    if gain > gains[left] + 1e-12:
                        gains[left], chosen[left] = gain, own
            later = gains
            choices.insert(0, chosen)
        tables.append((later, choices))
    return tables
