"""CopySpec: copy what followed the first place where the last gamma tokens stood.

Dumitru et al., "CopySpec: Accelerating LLMs with Speculative Copy-and-Paste Without Compromising Quality", 2025 (arXiv
2502.08923). One length of match only: a larger gamma copies less often and is more often right. Strong where answers
repeat the conversation (a second answer that changes the first); idle elsewhere. Its switching rule, copying where
there is a match and another drafter where not, is `copyspec|OTHER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from truedraft.card import Card
from truedraft.drafters._base import PerRow
from truedraft.drafters._texts import Told, root_of, told
from truedraft.drafters._trees import copied
from truedraft.tree import DraftTree, Row


@dataclass
class CopySpec(PerRow[Told]):
    card = Card(
        paper="arXiv 2502.08923 (2025)",
        idea="Copy what followed the first earlier place of the last few tokens, a set number of them.",
        family="retrieval",
        presets={"copyspec-5": {"gamma": 5}},
        published="Up to 2.35x on CNN/DM, 3.08x on second turns of chosen MT-Redundant categories.",
    )
    takes_references: ClassVar[bool] = True
    gamma: int = 3  # tokens that must match; published 3 in the evaluation, 5 in the code's interface
    length: int = 10  # tokens copied; published 10

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> Told:
        return told(row)

    def draft(self, row: Row, state: Told, ahead: Sequence[int], budget: int) -> DraftTree:
        state.follow(row)
        place = state.place(ahead, self.gamma)
        tokens = state.automaton.copy(place, self.gamma, min(self.length, budget))
        return copied(root_of(row, ahead), tokens, place.length)
