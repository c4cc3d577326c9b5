"""REST: retrieve what followed the last tokens in a corpus, as a tree of the most frequent continuations.

He et al., "REST: Retrieval-Based Speculative Decoding", 2023 (arXiv 2311.08252). The longest suffix of the text that
the corpus holds is looked for, up to `longest` tokens; all that followed it there, weighted by how often, is one tree.
It is as good as the corpus is close to what is written: code beside a repository, answers beside earlier answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.card import Card
from truedraft.drafters._base import PerRow
from truedraft.drafters._texts import root_of
from truedraft.drafters._trees import counted
from truedraft.errors import Refused
from truedraft.stores.corpus import Corpus, given
from truedraft.stores.memory import Places
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree, Row


@dataclass
class Rest(PerRow[Places]):
    card = Card(
        paper="arXiv 2311.08252 (2023)",
        idea="Draft the most frequent continuations of the last tokens in a corpus.",
        family="retrieval",
        needs=("corpus",),
        published="1.62x to 2.36x on text and code (7B and 13B models, one GPU).",
    )
    corpus: Any = None  # a Corpus or its file (`truedraft corpus build`)
    longest: int = 16  # tokens of the longest suffix looked for; published 16
    nodes: int = 64  # of the tree; published 64
    deep: int = 10  # tokens of a continuation; published 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._corpus: Corpus | None = None if self.corpus is None else given(self.corpus)

    @property
    def corpora(self) -> Sequence[Corpus]:
        return () if self._corpus is None else (self._corpus,)

    def ready(self, target: DecoderTarget) -> None:
        if self._corpus is None:
            raise Refused("rest needs a corpus: draft='rest:corpus=FILE', made by `truedraft corpus build`")

    @property
    def width(self) -> int:
        return self.nodes

    def begin(self, row: Row) -> Places:
        return Places()

    def draft(self, row: Row, state: Places, ahead: Sequence[int], budget: int) -> DraftTree:
        root = root_of(row, ahead)
        for automaton, cursor in state.follow([c.automaton for c in self.corpora], row.tokens):
            place = cursor.copy()
            automaton.follow(place, ahead)
            automaton.shorten(place, self.longest)
            for length, count in automaton.suffixes(place):
                automaton.shorten(place, length)
                grown = automaton.grow(place, min(self.nodes, budget), deep=self.deep)
                if grown.tokens:
                    return counted(root, grown, count, length)
        return DraftTree.chain(root)
