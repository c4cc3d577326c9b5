"""SAM decoding: copy from the longest earlier match, in the running text or in a corpus, found by suffix automata.

Hu et al., "SAM Decoding: Speculative Decoding via Suffix Automaton", 2024 (arXiv 2411.10666). The match may be of any
length. From the running text a chain is copied; from the corpus, which must match longer by `bias`, a tree is grown,
the larger the longer the match. Below `threshold` nothing is drafted: another drafter may then do better, as in
`sam?token-recycling`, the paper's own combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters._trees import copied_chain, frequency_tree, root_of
from truedraft.drafters.lookup._corpora import WithCorpora
from truedraft.drafters.lookup._texts import RowText, row_text
from truedraft.stores.memory import Places
from truedraft.tree import DraftTree, Row


@dataclass
class Sam(WithCorpora[tuple[RowText, Places]]):
    card = Card(
        paper="arXiv 2411.10666 (2024)",
        idea="Copy from the longest match of the last tokens in the text so far, or in a corpus.",
        family="retrieval",
        presets={"sam-alone": {"threshold": 1}},
        published="Spec-Bench, Vicuna 7B, A6000, greedy: 1.84x alone, 2.27x with Token Recycling.",
        also={
            "sam-decoding": "",
            "sam-decoding-with-eagle-2": "draft='sam?eagle2:FOLDER' is both",
        },
    )
    takes_references = True
    threshold: int = knob(5, 1, 1024)  # tokens of the shortest match; published 5
    bias: int = knob(5, 0, 1024)  # tokens by which a match in the corpus must be longer; published 5
    length: int = knob(40, 1, 1024)  # tokens of a chain; published 40
    nodes: int = knob(60, 1, 1024)  # nodes of a tree at most, 4 for each matched token; published 60
    corpus: Any = None  # a Corpus or its file, or several (a.tdc;b.tdc); published: texts of the same kind as the task

    @property
    def width(self) -> int:
        return max(self.length, self.nodes) if self.corpora else self.length

    def begin(self, row: Row) -> tuple[RowText, Places]:
        return row_text(row, self.pass_cost), Places()

    def draft(self, row: Row, state: tuple[RowText, Places], after: Sequence[int], budget: int) -> DraftTree:
        text, places = state
        text.follow(row)
        here, cursor = text.place(after)
        root = root_of(row, after)
        if found := self.found(places, row, after):
            automaton, there = max(found, key=lambda match: match[1].length)
            if there.length - self.bias >= max(cursor.length + 1, self.threshold):
                nodes = min(self.nodes, 1 + 4 * there.length, budget)
                automaton.shorten(there, LONGEST)
                return frequency_tree(root, automaton.grow(there, nodes), automaton.suffixes(there)[0][1], there.length)
        count = min(self.length, budget)
        tokens = here.copy(cursor.copy(), self.threshold, count, enough=count)
        return copied_chain(root, tokens or here.copy(cursor, self.threshold, count), cursor.length)


LONGEST = 64  # most tokens of a match whose continuations are counted
