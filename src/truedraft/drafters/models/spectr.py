"""SpecTr: a draft model samples several continuations, independently of each other.

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023 (arXiv 2310.15141). For the rule
`k-seq` of the same paper, and `multi-round`. Continuations share the nodes of a common prefix. Under `greedy` and
`seeded` they are the likeliest ones, and differ in their first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.tree import Draws


@dataclass
class SpecTr(ShapedDrafter):
    card = Card(
        paper="arXiv 2310.15141 (2023)",
        idea="A smaller model samples several continuations, independently of each other.",
        family="draft model",
        needs=("draft model",),
        published="PaLM 2 Bison drafted by Gecko on LM1B, 8 continuations of 8: 2.13x (single draft 1.55x).",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    paths: int = knob(8, 1, 64)  # continuations; published 8
    length: int = knob(8, 1, 64)  # tokens of each; published 8
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def width(self) -> int:
        return self.paths * self.length

    @property
    def levels(self) -> int:
        return self.length

    @property
    def draws(self) -> Draws:
        return "independent"

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        """Sample as many children of a node as continuations pass through it; equal ones share a node."""
        added: list[int] = []
        counts = [int(growing.score.get(node, self.paths)) for node in nodes]
        drawn = self.chosen_each(growing, nodes, laws, counts)
        for node, law, tokens in zip(nodes, laws, drawn, strict=True):
            first: dict[int, int] = {}
            for child in growing.add(node, tokens, law):
                token = growing.tokens[child]
                if token in first:
                    growing.score[first[token]] += 1
                else:
                    first[token], growing.score[child] = child, 1
            added += first.values()
        growing.end_level(added)
