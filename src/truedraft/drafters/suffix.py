"""SuffixDecoding: grow what most often followed the last tokens, here and in earlier outputs, as far as it is sure.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024 (arXiv 2411.04975).
Every suffix of the text that occurred before proposes a tree, as large as the match is long; the one with the most
expected tokens, by how often each continuation was seen, is drafted. It looks in the row's own text and in what earlier
rows said (of the same namespace, the oldest forgotten first), so it gains with every request of an agent's loop; on
text that never repeats it drafts little. Of short matches it drafts no more nodes than they have tokens; `suffix-wide`
drafts eight more, and leaves it to what became of such nodes how many are verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._copying import Remembering
from truedraft.drafters._texts import RowText, root_of
from truedraft.drafters._trees import counted
from truedraft.stores._cursor import Cursor, Grown
from truedraft.stores.automaton import Automaton
from truedraft.stores.memory import Places
from truedraft.tree import DraftTree, Row


@dataclass
class Suffix(Remembering):
    card = Card(
        paper="arXiv 2411.04975 (2024)",
        idea="Grow the most frequent continuations of what was just said, sized by how sure they are.",
        family="retrieval",
        presets={"suffix-chain": {"branches": 1}, "suffix-wide": {"offset": 8.0}},
        published="Up to 5.3x over plain decoding on agents' loads (AgenticSQL, SWE-Bench).",
    )
    depth: int = knob(64, 1, 1024)  # tokens of match and draft together; published 64
    alpha: float = knob(1.0, 0, 1e3)  # nodes for each matched token; published 1.0
    offset: float = knob(0.0, 0, 1e3)  # nodes besides; published 0.0
    rare: float = knob(0.1, 0, 1)  # least share of the matches that a node must have followed; published 0.1
    branches: int = knob(8, 1, 8)  # children of a node at most: 1 drafts chains; published both, chains and trees
    memory: int = knob(4_000_000, 1, 1_000_000_000)  # tokens of earlier outputs kept; published 100,000 outputs

    @property
    def width(self) -> int:
        return self.depth

    def draft(self, row: Row, state: tuple[RowText, Places], ahead: Sequence[int], budget: int) -> DraftTree:
        text, places = state
        text.follow(row)
        said = places.ahead(self._said.of(row.namespace), row.tokens, ahead)
        sources = [*text.places(ahead), *said]
        best, score = DraftTree.chain(root_of(row, ahead)), 0.0
        for automaton, cursor in sources:
            automaton.shorten(cursor, max(int(self.depth / (1 + self.alpha)), 1))  # beyond, drafts grow no further
            for length, count in automaton.suffixes(cursor):
                if self._size(length) <= score:
                    break
                automaton.shorten(cursor, length)
                grown = self._grown(automaton, cursor, length, count, budget)
                if (expected := sum(grown.counts) / count) > score:
                    best, score = counted(best.tokens[0], grown, count, length), expected
        return best

    def _size(self, length: int) -> float:
        return self.alpha * length + self.offset

    def _grown(self, automaton: Automaton, cursor: Cursor, length: int, count: int, budget: int) -> Grown:
        nodes = min(int(self._size(length)), budget, self.width)
        return automaton.grow(cursor, nodes, math.ceil(self.rare * count), self.branches, self.depth - length)
