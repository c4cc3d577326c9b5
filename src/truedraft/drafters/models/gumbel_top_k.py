"""Gumbel-top-k: a draft model's tree with siblings sampled without replacement, a fixed number of them per level.

RSD-C of Jeon et al., "Recursive Speculative Decoding", 2024 (arXiv 2402.14160), section 3.2.1: the largest k of log q
plus Gumbel noise are an ordered sample without replacement. `multi-round` verifies it exactly. Under `greedy` the
siblings are the likeliest tokens, under `seeded` those that the target's own noise ranks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import BRANCHES, Branching, GrowingTree, branched
from truedraft.drafters.models._model import ModelDrafter
from truedraft.tree import Draws


@dataclass
class GumbelTopK(Branching, ModelDrafter):
    card = Card(
        paper="arXiv 2402.14160 (2024)",
        idea="A smaller model drafts several different next tokens at each level, sampled without replacement.",
        family="draft model",
        needs=("draft model",),
        published="RSD-C, Llama 2 70B drafted by 115M, trees of 30 tokens: block efficiency above chain and SpecTr.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    branches: str = knob("2x2x2", form=BRANCHES, reader=branched)  # level by level; published e.g. 2x2x2

    @property
    def draws(self) -> Draws:
        return "distinct"

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        added = []
        for node, law in zip(nodes, laws, strict=True):
            count = self.children_of(growing, node)
            added += self.branch(growing, node, self.chosen(growing, node, law, count), law)
        growing.end_level(added)
