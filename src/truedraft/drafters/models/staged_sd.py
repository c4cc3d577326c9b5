"""Staged speculative decoding: a draft model's tree, made in few of its passes, since an n-gram table drafts for it.

Spector and Re, "Accelerating LLM Inference with Staged Speculative Decoding", 2023 (arXiv 2308.04623). The tree has
more alternatives at its first levels than at its last ones. It is the one that the draft model alone would draft, level
by level; but a Katz back-off trigram table, counted from what the draft model predicts as the text goes on, guesses how
the tree will grow, and a pass of the draft model reads the guesses too. Where they are right, several levels cost one
pass.

It wins over other trees of a draft model where that predicts what it has predicted before, and where a pass of it over
tens of nodes costs little more than over one; with a table of much of its text (`corpus`) on other texts too. Where
guesses are seldom right, the nodes that they add to its passes are lost. Drafts are point masses, which every rule but
`k-seq` accepts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._candidates import candidates
from truedraft.drafters._corpora import HasCorpora
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._shapes import BRANCHES, NODES, Branching, branched, nodes_of
from truedraft.drafters.models._model import ModelDrafter
from truedraft.stores.katz import Katz
from truedraft.stores.memory import Tenants
from truedraft.tree import DraftTree, Row


@dataclass
class Stages:
    """What is known of a growing tree.

    child: (node, token) -> the child with that token. chosen: node that the draft model has read -> the tokens that it
    would draft below, with the probability that each is right. guessed: nodes that the table added.
    """

    child: dict[tuple[int, int], int] = field(default_factory=dict)
    chosen: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    guessed: int = 0


@dataclass
class StagedSd(Branching, HasCorpora, ModelDrafter):
    card = Card(
        paper="arXiv 2308.04623 (2023)",
        idea="A smaller model drafts a tree, and a trigram table of its text saves most of its passes.",
        family="draft model",
        needs=("draft model",),
        published="GPT-2-L (762M) drafted by 40M, HumanEval prompts, RTX 4090, greedy: 3.16x lower latency.",
        also={
            "staged-speculative-decoding": "",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    branches: str = knob("3x2x1x1x1", form=BRANCHES, reader=branched)  # by level; published: more early, fewer deep
    least: float = knob(0.001, 0, 1)  # probability of a path that is drafted; unpublished
    guesses: int = knob(32, 0, 512)  # nodes that the table adds to a pass of the draft model; unpublished
    contexts: int = knob(65_536, 1, 4_194_304)  # of the table, least recently counted forgotten first; unpublished
    namespaces: int = knob(16, 1, 65_536)  # with a table each, least recently used evicted first; published: one
    corpus: Any = None  # text of the draft model, counted first: a Corpus, its file, or several (a.tdc;b.tdc)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.forget()

    def forget(self) -> None:
        self._tables = Tenants(self.namespaces, lambda: self._first.copy(), lambda table: table.nbytes)

    @cached_property
    def _first(self) -> Katz:
        """The table that every namespace starts from."""
        table = Katz(self.contexts)
        for corpus in self.corpora:
            table.count_all(corpus.automaton.text)
        return table

    def room(self, budget: int) -> int:
        return nodes_of(self._shape) + self._most_guessed if budget > 0 else 0

    @property
    def _most_guessed(self) -> int:
        """Nodes that the table may add to the passes of a draft."""
        return min(self.levels * self.guesses, NODES)

    def _growing(self, row: Row, budget: int, after: Sequence[int] = ()) -> GrowingTree:
        growing = super()._growing(row, budget, after)
        growing.state = Stages()
        growing.frontier += self._guessed(growing, growing.frontier)
        return growing

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> None:
        """None: the nodes of its table grow beside those of the draft model."""

    def most_children(self, growing: GrowingTree) -> int:
        return max(map(max, self._shape))

    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        each = zip(nodes, tokens, chances, strict=True)
        self._choose(growing, {node: [*zip(some, likely, strict=True)] for node, some, likely in each})

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        depths = [growing.depth[node] for node in nodes]
        found = candidates(self, growing.row, laws, depths, self.most_children(growing))
        self._choose(growing, dict(zip(nodes, found, strict=True)))

    def _choose(self, growing: GrowingTree, chosen: dict[int, list[tuple[int, float]]]) -> None:
        """Continue with what is drafted below the nodes that were read."""
        growing.state.chosen |= chosen
        _, needed = self._drafted(growing)
        growing.frontier = [*needed, *self._guessed(growing, needed)]

    def finished(self, growing: GrowingTree) -> DraftTree:
        drafted, _ = self._drafted(growing)
        table, chosen = self._tables.of(growing.row.namespace), growing.state.chosen
        for node in (growing.root, *drafted):
            before = self._before(growing, node)
            for token, chance in chosen.get(node, ()):
                table.count(before, token, chance)
        return growing.tree("certain", drafted)

    def _drafted(self, growing: GrowingTree) -> tuple[list[int], list[int]]:
        """The nodes of the draft, level by level, as far as the draft model has read what decides them, and the nodes
        that it has to read next."""
        level, drafted, needed = [(growing.root, 0)], list[int](), list[int]()
        for counts in self._shape:
            below = []
            for node, place in level:
                most = min(counts[place], growing.budget - len(drafted))
                if most <= 0 or not self._inner(growing, node):
                    continue
                if node not in growing.state.chosen:
                    needed.append(node)
                    continue
                first, above = sum(counts[:place]), growing.score.get(node, 1.0)
                for i, (token, chance) in enumerate(growing.state.chosen[node][:most]):
                    if above * chance >= self.least:
                        below.append((self._child(growing, node, token), first + i))
                        growing.score[below[-1][0]] = above * chance
                        drafted.append(below[-1][0])
            level = below
        return drafted, needed

    def _inner(self, growing: GrowingTree, node: int) -> bool:
        """Whether a node may have children."""
        ends = node != growing.root and growing.tokens[node] in growing.row.ends
        return growing.depth[node] < growing.deepest and not ends

    def _child(self, growing: GrowingTree, node: int, token: int) -> int:
        """The child of a node with a token, which is added if there is none."""
        known = growing.state.child
        if (node, token) not in known:
            (known[node, token],) = growing.add(node, [token])
        return known[node, token]

    def _guessed(self, growing: GrowingTree, needed: Sequence[int]) -> list[int]:
        """Add the nodes of most probability, by the table, that may be needed next below those that are read now."""
        table, guessed = self._tables.of(growing.row.namespace), list[int]()
        heap: list[tuple[float, int, int]] = []  # -path probability, node, token below it
        most = min(self.guesses, self._most_guessed - growing.state.guessed)
        if growing.budget <= self._shape[0][0]:
            most = 0  # the root alone has children
        open_ = [(node, growing.score.get(node, 1.0)) for node in needed]
        while len(guessed) < most:
            for node, above in open_:
                if growing.depth[node] + 1 < growing.deepest:
                    for token, chance in table.law(self._before(growing, node)).items():
                        if above * chance >= self.least and self._readable(growing, token):
                            heapq.heappush(heap, (-above * chance, node, token))
            if not heap:
                break
            value, node, token = heapq.heappop(heap)
            guessed.append(self._child(growing, node, token))
            open_ = [(guessed[-1], -value)]
        growing.state.guessed += len(guessed)
        return guessed

    def _readable(self, growing: GrowingTree, token: int) -> bool:
        """Whether the draft model has a token, and the text may go on after it."""
        return token not in growing.row.ends and (growing.shared is None or token in growing.shared)

    def _before(self, growing: GrowingTree, node: int) -> list[int]:
        """The last two tokens up to a node."""
        path = growing.path(node)[-2:]
        return [*growing.row.tokens[-2:], *path][-2:]
