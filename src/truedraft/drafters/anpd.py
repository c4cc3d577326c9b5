"""ANPD: an n-gram table of the running text, from the longest n-gram down; the latest use of an n-gram counts.

Ou et al., "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel Decoding", 2024 (arXiv
2404.08698). Token by token: what followed the last N - 1 tokens the last time, or the last N - 2, ...; then the same
with that token drafted. Adapts at once to what the text does now; other copying drafters go on with the place that they
have found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._copying import InText
from truedraft.drafters._texts import RowText, root_of
from truedraft.drafters._trees import KEEPS
from truedraft.tree import DraftTree, Row


@dataclass
class Anpd(InText):
    card = Card(
        paper="arXiv 2404.08698 (2024)",
        idea="Draft token by token what followed the last few tokens the last time they stood in the text.",
        family="retrieval",
        published="Up to 3.67x (LLaMA family, code); most on code and summaries.",
    )
    n: int = knob(5, 2, 1024)  # longest n-gram, its successor counted; published about 5 (unverified)
    length: int = knob(6, 1, 1024)  # tokens drafted; published about 6 (unverified)

    def draft(self, row: Row, state: RowText, ahead: Sequence[int], budget: int) -> DraftTree:
        state.follow(row)
        tokens: list[int] = []
        confidence: list[float] = []
        text, key = max(reversed(state.places(ahead, self.n - 1)), key=lambda place: place[1].length)
        for _ in range(min(self.length, budget)):
            found = key.copy()
            if not (token := text.copy(found, 1, 1, latest=True)):
                break
            tokens += token
            confidence.append(KEEPS[found.length])
            text.follow(key, token)
            text.shorten(key, self.n - 1)
        return DraftTree.chain(root_of(row, ahead), tokens, confidence)
