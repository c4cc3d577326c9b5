"""ADED: a Monte-Carlo tree search finds the most promising paths in a trigram table that adapts to the text.

Liu et al., "Adaptive Draft-Verification for Efficient Large Language Model Decoding", 2024 (arXiv 2407.12021). What
followed each pair of tokens has a weight: at first its frequency in a corpus or, without one, in references and prompt;
it then rises each time that trigram is among the last tokens. The search balances likely paths against untried ones.
With two tokens of context it drafts short paths everywhere; where text repeats, copying drafts more. The paper's last
step, one more token below every path, is left out: at 24 nodes it would be pruned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters._trees import root_of
from truedraft.drafters.lookup._corpora import WithCorpora
from truedraft.stores.memory import Tenants
from truedraft.stores.trigrams import Trigrams, trigrams
from truedraft.tree import DraftTree, Row

CHUNK = 1 << 16  # tokens of a corpus counted at a time


@dataclass
class Aded(WithCorpora[Trigrams]):
    card = Card(
        paper="arXiv 2407.12021 (2024)",
        idea="Search a trigram table, which adapts to the text, for the most promising paths.",
        family="retrieval",
        published="Up to 2.5x; 1.9x with a table of 253 MB (Vicuna 7B/13B; MT-Bench, Alpaca, HumanEval).",
    )
    takes_references = True
    nodes: int = knob(24, 1, 64)  # of the tree; published 24
    simulations: int = knob(150, 1, 10_000)  # published 150
    depth: int = knob(4, 1, 16)  # published 4
    c1: float = knob(32.0, 0, 1e6)  # weight of untried paths; published 32
    c2: float = knob(8.0, 1e-3, 1e6)  # how slowly that grows; published 8
    window: int = knob(16, 2, 1024)  # last tokens whose trigrams gain weight before each step; published 16
    gain: float = knob(0.04, 1e-6, 1e3)  # weight gained; published 0.04
    most: float = knob(3.0, 1e-6, 1e6)  # weight of a trigram; published 3.0
    rows: int = knob(262_144, 1, 4_194_304)  # token pairs of a namespace, least recently used evicted; unpublished
    namespaces: int = knob(16, 1, 65_536)  # kept, least recently used evicted first; unpublished
    corpus: Any = None  # a Corpus or its file, or several (a.tdc;b.tdc); published: UltraChat, code

    def forget(self) -> None:
        super().forget()
        self._tables: Tenants[Trigrams] = Tenants(
            self.namespaces, lambda: self._first.copy(), lambda table: table.nbytes
        )

    @property
    def width(self) -> int:
        return self.nodes

    def begin(self, row: Row) -> Trigrams:
        table = self._tables.of(row.namespace)
        gain = self.gain * (self.window - 2)  # as if decoded one token at a time
        for text in (*row.references, row.tokens):
            table.weigh(text, gain, self.most)
        return table

    @cached_property
    def _first(self) -> Trigrams:
        """The table that every namespace starts from."""
        table = trigrams(self.rows)
        for corpus in self.corpora:
            text = corpus.automaton.text
            for at in range(0, len(text), CHUNK):
                table.weigh(text[at : at + CHUNK], self.gain, self.most)
        return table

    def draft(self, row: Row, state: Trigrams, after: Sequence[int], budget: int) -> DraftTree:
        last = [*row.tokens[-self.window :], *after][-self.window :]
        if not after:
            state.weigh(last, self.gain, self.most)
        root = root_of(row, after)
        if len(last) < 2:
            return DraftTree.chain(root)
        most = min(self.nodes, budget)
        found = state.search(last[-2], root, self.simulations, self.depth, self.c1, self.c2, most)
        return DraftTree(
            (root, *found.tokens), (-1, *(p + 1 for p in found.parents)),
            confidence=(1.0, *(SURE * share for share in found.shares)),
        )  # fmt: skip


SURE = 0.6  # probability that one of a pair's recorded successors follows: a prior, calibrated online
