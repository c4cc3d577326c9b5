"""ANPD: draft token by token with an n-gram table of the text so far, the longest n-gram first.

Ou et al., "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel Decoding", 2024 (arXiv
2404.08698). Each token is what followed the latest occurrence of the last N - 1 tokens, or of the last N - 2, ...; the
next one is looked up with that token appended. It adapts at once to the latest text; other copying drafters continue
from the match that they found first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._trees import MATCH_CONFIDENCE, root_of
from truedraft.drafters.lookup._copying import CopiedChains
from truedraft.drafters.lookup._texts import RowText
from truedraft.tree import DraftTree, Row


@dataclass
class Anpd(CopiedChains):
    card = Card(
        paper="arXiv 2404.08698 (2024)",
        idea="Draft token by token what followed the latest occurrence of the last few tokens in the text.",
        family="retrieval",
        published="Up to 3.67x (LLaMA family, code); most on code and summaries.",
    )
    n: int = knob(5, 2, 1024)  # longest n-gram, its successor counted; published about 5 (unverified)
    length: int = knob(6, 1, 1024)  # tokens drafted; published about 6 (unverified)

    def draft(self, row: Row, state: RowText, after: Sequence[int], budget: int) -> DraftTree:
        state.follow(row)
        tokens: list[int] = []
        confidence: list[float] = []
        text, key = max(reversed(state.places(after, self.n - 1)), key=lambda match: match[1].length)
        for _ in range(min(self.length, budget)):
            found = key.copy()
            if not (token := text.copy(found, 1, 1, latest=True)):
                break
            tokens += token
            confidence.append(MATCH_CONFIDENCE[found.length])
            text.follow(key, token)
            text.shorten(key, self.n - 1)
        return DraftTree.chain(root_of(row, after), tokens, confidence)
