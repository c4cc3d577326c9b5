"""Prompt lookup: copy what followed the first earlier occurrence of the last few tokens.

Saxena, "Prompt Lookup Decoding", 2023 (github.com/apoorvumang/prompt-lookup-decoding).
No model and no training; strong where the output repeats its input (editing, summaries, chat over a text), idle
elsewhere: without a match nothing is drafted and no time is lost. Under the cost control, which verifies no more of a
draft than pays, drafts may be longer than the published ones: `prompt-lookup-long`.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters.lookup._copying import SuffixLookup


@dataclass
class PromptLookup(SuffixLookup):
    card = Card(
        paper="github.com/apoorvumang/prompt-lookup-decoding (2023)",
        idea="Copy what followed the first earlier occurrence of the last few tokens in the text.",
        family="retrieval",
        presets={"prompt-lookup-hf": {"n": 2}, "prompt-lookup-long": {"n": 5, "length": 40}},
        published="Spec-Bench, Vicuna 7B, A100, greedy: 1.66x overall, 2.66x summarising, 1.06x translation.",
        also={
            "pld": "",
            "prompt-lookup-decoding": "",
            "ngram": "",
            "ngram-speculator": "",
        },
    )
    n: int = knob(3, 1, 1024)  # longest n-gram searched; published default 3, transformers' own default is 2
    length: int = knob(10, 1, 1024)  # tokens copied; published default 10

    @property
    def span(self) -> tuple[int, int]:
        return 1, self.n
