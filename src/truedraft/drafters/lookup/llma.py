"""LLMA: copy from reference documents, after a match of the last few tokens of the output.

Yang et al., "Inference with Reference: Lossless Acceleration of Large Language Models", 2023 (arXiv 2304.04487).
No training; strong where the answer quotes text that the caller can give: retrieved passages, an earlier version, the
file being edited. Without references the prompt is the document.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters.lookup._copying import SuffixLookup


@dataclass
class Llma(SuffixLookup):
    card = Card(
        paper="arXiv 2304.04487 (2023)",
        idea="Copy from documents given by the caller, after the passage that the output has just quoted.",
        family="retrieval",
        presets={"llma-trigger2": {"trigger": 2}},
        published="Over 2x in retrieval-augmented, cache-assisted and multi-turn generation (LLaMA 7B-30B, V100).",
        also={
            "inference-with-reference": "",
        },
    )
    trigger: int = knob(1, 1, 1024)  # shortest n-gram that starts a copy; published default 1
    longest: int = knob(5, 1, 1024)  # longest n-gram searched; published 5
    length: int = knob(19, 1, 1024)  # tokens copied; published k = 20 with the last token itself counted

    @property
    def span(self) -> tuple[int, int]:
        return self.trigger, self.longest
