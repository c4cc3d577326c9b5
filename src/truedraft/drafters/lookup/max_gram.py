"""Max-Gram: copy what followed the longest repeated suffix; without one, continue with a bigram table.

The statistical bottom of Chen et al., "Cascade Speculative Drafting for Even Faster LLM Inference", NeurIPS 2024 (arXiv
2312.11462), section 3.3: it drafts for the smallest of several draft models, so that none decodes token by token. The
paper counts its bigrams in Wikipedia; here the table holds the target's last likeliest token after each token, in this
row and in earlier ones of its namespace, so no data is needed. Alone it is a `prompt-lookup` that uses the longest
match of any length, and drafts where nothing matches too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import match_confidence, root_of
from truedraft.drafters.lookup._texts import RowText, row_text
from truedraft.stores.memory import Tenants
from truedraft.stores.successors import Successors, Template
from truedraft.tree import Accepted, DraftTree, Row

BIGRAM = 0.45  # probability that the likeliest successor is right: a prior, calibrated online


@dataclass
class MaxGram(PerRow[tuple[RowText, Successors]]):
    card = Card(
        paper="arXiv 2312.11462 (2023), section 3.3",
        idea="Copy what followed the longest repeated suffix, or else the likeliest token after each token.",
        family="retrieval",
        published="Given only inside the cascade: see cs-drafting.",
    )
    length: int = knob(10, 1, 1024)  # tokens drafted; published 10
    shortest: int = knob(1, 1, 1024)  # tokens that must match for a copy; published 1 (unverified)
    namespaces: int = knob(64, 1, 65_536)  # kept, least recently used evicted first; published: one table of Wikipedia

    takes_references = True

    def forget(self) -> None:
        super().forget()
        self._bigrams = Tenants(self.namespaces, lambda: Successors(1), lambda bigrams: bigrams.nbytes)

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> tuple[RowText, Successors]:
        return row_text(row, self.pass_cost), self._bigrams.of(row.namespace)

    def draft(self, row: Row, state: tuple[RowText, Successors], after: Sequence[int], budget: int) -> DraftTree:
        (text, bigrams), root, most = state, root_of(row, after), min(self.length, budget)
        text.follow(row)
        automaton, cursor = text.place(after)
        copy = automaton.copy(cursor, self.shortest, most)
        tokens, _, confidence = bigrams.tree(copy[-1] if copy else root, most - len(copy), chain_of(self.length))
        return DraftTree.chain(
            root, [*copy, *tokens[1:]], [*match_confidence(cursor.length, len(copy)), *confidence[1:]]
        )

    def learn(
        self, row: Row, state: tuple[RowText, Successors], tree: DraftTree, logits: Tensor, accepted: Accepted
    ) -> None:
        state[1].learn(tree.tokens, logits)


@lru_cache(maxsize=8)
def chain_of(length: int) -> Template:
    """A chain of likeliest successors."""
    return Template(array("i", range(length)), array("i", [0] * length), array("d", [BIGRAM] * length))
