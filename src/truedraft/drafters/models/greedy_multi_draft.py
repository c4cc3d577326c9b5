"""Greedy multi-draft: a draft model's likeliest tokens, and one more sampled from the remaining distribution.

Hu et al., "Towards Optimal Multi-Draft Speculative Decoding", ICLR 2025 (arXiv 2502.18779), section 4. The rule of the
same name reaches the best acceptance that such drafts allow; `multi-round` verifies them too, and accepts fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truedraft.card import Card, knob
from truedraft.chance import likeliest
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.drafters._shapes import BRANCHES, Branching, branched
from truedraft.tree import Draws


@dataclass
class GreedyMultiDraft(Branching, ShapedDrafter):
    card = Card(
        paper="arXiv 2502.18779 (2025)",
        idea="A smaller model drafts its likeliest next tokens, and one more sampled from the rest.",
        family="draft model",
        needs=("draft model",),
        published="Acceptance above recursive rejection and K-SEQ at equal numbers of drafts.",
        also={
            "mdsd": "",
            "mdsd-optimal": "its greedy multi-draft sampling is draft='greedy-multi-draft:model=NAME' with "
            "rule='greedy-multi-draft', and `truedraft.accept.optimal_acceptance` computes the optimum",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    branches: str = knob("3x2x1", form=BRANCHES, reader=branched)  # level by level; the paper compares 2 to 8 at one
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def draws(self) -> Draws:
        return "last"

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        added = []
        for node, law in zip(nodes, laws, strict=True):
            count = min(self.children_of(growing, node), growing.room)
            if self.preferred(growing.row) != "law":
                added += self.branch(growing, node, self.chosen(growing, node, law, count))
            elif count and law.any():
                certain = likeliest(law, count - 1)
                rest = law.index_fill(0, torch.tensor(certain, dtype=torch.long, device=law.device), 0.0)
                left = rest.sum()
                if left > 0:
                    drawn = growing.row.request.chance.draw(rest / left, growing.row)
                    added += self.branch(growing, node, certain + drawn, rest / left)
                else:
                    added += self.branch(growing, node, certain)
        growing.end_level(added)
