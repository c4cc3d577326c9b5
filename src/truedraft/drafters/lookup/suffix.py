"""SuffixDecoding: draft a tree of the most frequent continuations of the last tokens, here and in earlier outputs.

Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024 (arXiv 2411.04975).
Every suffix of the text that occurred before proposes a tree, as large as the match is long; the one with the most
expected tokens, by the frequency of each continuation, is drafted. It searches the row's own text and the outputs of
earlier rows (of the same namespace, the oldest evicted first), so it gains with every request of an agent's loop; on
text that never repeats it drafts little. A match is followed by at most as many nodes as it has tokens; `suffix-wide`
drafts eight more, and leaves it to their calibrated confidence how many are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._trees import likeliest_continuations, root_of
from truedraft.drafters.lookup._copying import WithMemory
from truedraft.drafters.lookup._texts import RowText
from truedraft.stores._cursor import Sizes
from truedraft.stores.memory import Places
from truedraft.tree import DraftTree, Row


@dataclass
class Suffix(WithMemory):
    card = Card(
        paper="arXiv 2411.04975 (2024)",
        idea="Draft the most frequent continuations of the last tokens, as many as their match is long.",
        family="retrieval",
        presets={"suffix-chain": {"branches": 1}, "suffix-wide": {"offset": 8.0}},
        published="Up to 5.3x over plain decoding on agents' loads (AgenticSQL, SWE-Bench).",
        also={
            "suffix-decoding": "",
        },
    )
    depth: int = knob(64, 1, 1024)  # tokens of match and draft together; published 64
    alpha: float = knob(1.0, 0, 1e3)  # nodes for each matched token; published 1.0
    offset: float = knob(0.0, 0, 1e3)  # nodes in addition; published 0.0
    rare: float = knob(0.1, 0, 1)  # least share of the occurrences that a node must follow; published 0.1
    branches: int = knob(8, 1, 8)  # children of a node at most: 1 drafts chains; published both, chains and trees
    memory: int = knob(4_000_000, 1, 1_000_000_000)  # tokens of earlier outputs kept; published 100,000 outputs

    @property
    def width(self) -> int:
        return self.depth

    def draft(self, row: Row, state: tuple[RowText, Places], after: Sequence[int], budget: int) -> DraftTree:
        text, places = state
        text.follow(row)
        earlier = places.following(self._outputs.of(row.namespace), row.tokens, after)
        alpha, depth = self.alpha, self.depth
        sizes = Sizes(min(budget, depth), alpha, self.offset, self.rare, self.branches, depth)
        longest = max(int(depth / (1 + alpha)), 1)  # longer matches draft no more
        return likeliest_continuations(root_of(row, after), [*text.places(after), *earlier], sizes, longest)
