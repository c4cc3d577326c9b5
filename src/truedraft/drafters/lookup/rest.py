"""REST: retrieve what followed the last tokens in a corpus, as a tree of the most frequent continuations.

He et al., "REST: Retrieval-Based Speculative Decoding", 2023 (arXiv 2311.08252). The longest suffix of the text that
the corpus contains is searched, up to `longest` tokens; its continuations there, weighted by frequency, form the tree.
It gains where the corpus is close to the output: a repository for its code, earlier answers for answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters._trees import frequency_tree, root_of
from truedraft.drafters.lookup._corpora import WithCorpora
from truedraft.errors import Refused
from truedraft.stores.memory import Places
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Row


@dataclass
class Rest(WithCorpora[Places]):
    card = Card(
        paper="arXiv 2311.08252 (2023)",
        idea="Draft the most frequent continuations of the last tokens in a corpus.",
        family="retrieval",
        needs=("corpus",),
        published="1.62x to 2.36x on text and code (7B and 13B models, one GPU).",
    )
    corpus: Any = None  # a Corpus or its file, or several (a.tdc;b.tdc; `truedraft corpus build`)
    longest: int = knob(16, 1, 1024)  # tokens of the longest suffix searched; published 16
    nodes: int = knob(64, 1, 1024)  # of the tree; published 64
    deep: int = knob(10, 1, 128)  # tokens of a continuation; published 10

    def bind(self, target: Target) -> None:
        super().bind(target)
        if not self.corpora:
            raise Refused("rest needs a corpus: draft='rest:corpus=FILE', made by `truedraft corpus build`")

    @property
    def width(self) -> int:
        return self.nodes

    def begin(self, row: Row) -> Places:
        return Places()

    def draft(self, row: Row, state: Places, after: Sequence[int], budget: int) -> DraftTree:
        best, longest = DraftTree.chain(root_of(row, after)), 0
        for automaton, cursor in self.found(state, row, after):
            automaton.shorten(cursor, self.longest)
            for length, count in automaton.suffixes(cursor):
                if length <= longest:
                    break
                automaton.shorten(cursor, length)
                grown = automaton.grow(cursor, min(self.nodes, budget), deep=self.deep)
                if grown.tokens:
                    best, longest = frequency_tree(best.tokens[0], grown, count, length), length
        return best
