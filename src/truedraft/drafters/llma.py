"""LLMA: copy from reference documents, where a few tokens of the output have been found in them.

Yang et al., "Inference with Reference: Lossless Acceleration of Large Language Models", 2023 (arXiv 2304.04487).
No training; strong where the answer quotes what the caller can name: retrieved passages, an earlier version, the
file being edited. Without references the prompt is the document.
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
class Llma(PerRow[Told]):
    card = Card(
        paper="arXiv 2304.04487 (2023)",
        idea="Copy from documents given by the caller, from the place that the output has just been quoting.",
        family="retrieval",
        presets={"llma-trigger2": {"trigger": 2}},
        published="Over 2x in retrieval-augmented, cache-assisted and multi-turn generation (LLaMA 7B-30B, V100).",
    )
    takes_references: ClassVar[bool] = True
    trigger: int = 1  # shortest n-gram that starts a copy; published default 1
    longest: int = 5  # longest n-gram looked for; published 5
    length: int = 19  # tokens copied; published k = 20 with the last token itself counted

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> Told:
        return told(row)

    def draft(self, row: Row, state: Told, ahead: Sequence[int], budget: int) -> DraftTree:
        state.follow(row)
        place = state.place(ahead, self.longest)
        tokens = state.automaton.copy(place, self.trigger, min(self.length, budget))
        return copied(root_of(row, ahead), tokens, place.length)
