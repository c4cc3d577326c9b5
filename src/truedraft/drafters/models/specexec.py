"""SpecExec: a large tree of a draft model's likeliest continuations, found best-first.

Svirschevski et al., "SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference on Consumer
Devices", NeurIPS 2024 (arXiv 2406.02532). Each pass of the draft model expands the best nodes that it has not expanded
yet, whatever their depth, by the probability of their paths with a decay per level; the best `nodes` of all are kept,
and the search ends when no new node is among them. The target draws one token at every node; the text follows its
tokens through the tree as long as they are there. It wins where a pass of the target over hundreds of nodes costs
little more than over one, as with weights that are read from disk or from another device's memory. Where wide passes
cost more, `opt-tree`, which stops when a level adds little, is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._ranked import LikeliestGrowth
from truedraft.drafters._shaped import NodeBudget
from truedraft.drafters._timed import PayingLevels
from truedraft.runtime._base import TreeGrowth
from truedraft.tree import DraftTree


@dataclass
class SpecExec(PayingLevels, LikeliestGrowth, NodeBudget):
    card = Card(
        paper="arXiv 2406.02532 (2024)",
        idea="A large tree of a smaller model's likeliest continuations, the best nodes first at any depth.",
        family="draft model",
        needs=("draft model",),
        presets={"specexec-published": {"nodes": 1024, "beam": 128, "branches": 16, "length": 32}},
        published="Up to 20 tokens a pass; 4 to 6 tokens/s for models of 50B and more, offloaded to RAM in 4 bits.",
        lacks={
            "specexec": "the search and the acceptance are as published; weights that are read from memory or disk "
            "during a pass, for which it was made, are refused",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    nodes: int = knob(48, 1, 2048)  # of the draft; published 128 to 1024
    beam: int = knob(8, 1, 512)  # nodes expanded in each pass; published 32 to 128
    branches: int = knob(8, 1, 256)  # children of each; published 16
    length: int = knob(12, 1, 256)  # depth at most; published 32
    decay: float = knob(0.95, 0.01, 1)  # of a path's probability per level, where nodes are compared; published 0.95
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return True

    def room(self, budget: int) -> int:
        return self.expansions * self.branches if budget > 0 else 0

    @property
    def expansions(self) -> int:
        return 2 * self.length * self.beam

    def most_children(self, growing: GrowingTree) -> int:
        return self.branches

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> TreeGrowth:
        return TreeGrowth(
            children=self.branches, kept=self.nodes, width=self.beam, levels=2 * self.length, decay=self.decay,
            **self.paying(rows),
        )  # fmt: skip

    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        score, decay, count = growing.score, self.decay, self.branches
        parents, drafted, values = list[int](), list[int](), list[float]()
        for node, some, likely in zip(nodes, tokens, chances, strict=True):
            above = score.get(node, 1.0) * decay
            values += [above * chance for chance in likely[:count]]
            drafted += some[:count]
            parents += [node] * len(some[:count])
        score.update(zip(growing.add_each(parents, drafted), values, strict=False))
        best = sorted(score, key=score.__getitem__, reverse=True)[: min(self.nodes, growing.budget)]
        growing.score = {node: score[node] for node in best}  # others are never among the best again
        waiting = [node for node in best if node not in growing.expanded]
        growing.end_level(waiting if growing.passes + 1 < 2 * self.length else [], self.beam)

    def finished(self, growing: GrowingTree) -> DraftTree:
        return growing.tree("certain", list(growing.score))
