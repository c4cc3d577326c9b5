"""CopySpec: copy what followed the first occurrence of the last gamma tokens.

Dumitru et al., "CopySpec: Accelerating LLMs with Speculative Copy-and-Paste Without Compromising Quality", 2025 (arXiv
2502.08923). Matches have a fixed length: a larger gamma copies less often and is right more often. Strong where answers
repeat the conversation (a second answer that changes the first); drafts nothing elsewhere. Its switching rule, copying
where there is a match and another drafter where not, is `copyspec?OTHER`.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters.lookup._copying import SuffixLookup


@dataclass
class CopySpec(SuffixLookup):
    card = Card(
        paper="arXiv 2502.08923 (2025)",
        idea="Copy what followed the first earlier occurrence of the last few tokens, a fixed number of them.",
        family="retrieval",
        presets={"copyspec-5": {"gamma": 5}},
        published="Up to 2.35x on CNN/DM, 3.08x on second turns of chosen MT-Redundant categories.",
    )
    gamma: int = knob(3, 1, 1024)  # tokens that must match; published 3 in the evaluation, 5 in the code's interface
    length: int = knob(10, 1, 1024)  # tokens copied; published 10

    @property
    def span(self) -> tuple[int, int]:
        return self.gamma, self.gamma
