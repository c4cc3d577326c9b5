"""Grammar: draft the tokens that the constraint of a request forces: the keys and punctuation of a schema.

Beurer-Kellner et al., "Guiding LLMs The Right Way: Fast, Non-Invasive Constrained Generation", 2024 (arXiv 2403.06988),
which drafts what a grammar makes likely; here only what it forces, so that no draft is wrong. It drafts nothing for
requests without a constraint, so continue it by another: `grammar>prompt-lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import root_of
from truedraft.sampling import RowwiseProcessor
from truedraft.tree import DraftTree, Row

CONFIDENCE = 0.99  # another processor may exclude what is forced


@dataclass
class Grammar(PerRow[None]):
    card = Card(
        paper="arXiv 2403.06988 (2024)",
        idea="Draft the tokens that the constraint of a request forces, such as the keys of a JSON schema.",
        family="grammar",
    )
    length: int = knob(32, 1, 1024)  # most tokens drafted; not published

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> None: ...

    def draft(self, row: Row, state: None, after: Sequence[int], budget: int) -> DraftTree:
        processors = [p for p in row.request.laws.processors if isinstance(p, RowwiseProcessor)]
        tokens: list[int] = []
        if processors:
            ids = [*row.request.history.prefix([row])[0].tolist(), *after]
            tokens = max((processor.forced(ids) for processor in processors), key=len)
        tokens = tokens[: min(self.length, budget)]
        return DraftTree.chain(root_of(row, after), tokens, [CONFIDENCE] * len(tokens))
