"""Gumbel-top-k: a draft model's tree with siblings sampled without replacement, a fixed number of them per level.

RSD-C of Jeon et al., "Recursive Speculative Decoding", 2024 (arXiv 2402.14160), section 3.2.1: the largest k of log q
plus Gumbel noise are an ordered sample without replacement. `multi-round` verifies it exactly. Under `greedy` the
siblings are the likeliest tokens, under `seeded` those that the target's own noise ranks first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.drafters._shapes import BRANCHES, Branching, branched
from truedraft.tree import Draws


@dataclass
class GumbelTopK(Branching, ShapedDrafter):
    card = Card(
        paper="arXiv 2402.14160 (2024)",
        idea="A smaller model drafts several different next tokens at each level, sampled without replacement.",
        family="draft model",
        needs=("draft model",),
        published="RSD-C, Llama 2 70B drafted by 115M, trees of 30 tokens: block efficiency above chain and SpecTr.",
        also={
            "rsd": "its trees are draft='gumbel-top-k:model=NAME' and draft='stochastic-beam:model=NAME', verified by "
            "rule='multi-round'",
            "recursive-speculative-decoding": "its trees are draft='gumbel-top-k:model=NAME' and "
            "draft='stochastic-beam:model=NAME', verified by rule='multi-round'",
            "rsd-c": "",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    branches: str = knob("2x2x2", form=BRANCHES, reader=branched)  # level by level; published e.g. 2x2x2
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def draws(self) -> Draws:
        return "distinct"
