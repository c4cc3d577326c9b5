"""Mirror-SD: while the target verifies, the draft model continues every likely outcome of the pass, not one alone.

Bhendawade et al., "Mirror Speculative Decoding: Breaking the Serial Barrier in LLM Inference", 2025 (arXiv 2510.13161).
A pass accepts a prefix of its draft and corrects the next token. `pearl` continues the draft as if all of it were
accepted; here the likeliest pairs of prefix and correction have a continuation of their own each, grown together, a
pass of the draft model per level. If the pass ends with one of these pairs, the next draft is there at once. It wins
over `pearl` where drafts are often wrong at a token for which the draft model has few alternatives, and its passes over
several tokens cost little more than over one.

In the paper corrections are read from an early layer of the target, by a message in the middle of its pass, and the
draft model is trained to emit several tokens a step. Here they are the draft model's own next choices, so that any
target and any draft model will do, and compiled passes are not divided. Half-way through a pass of small models, whose
heads are not trained for it, the target's law is the worse of the two (`benchmarks/handover.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.models._overlapping import OverlappingDrafter


@dataclass
class MirrorSd(OverlappingDrafter):
    card = Card(
        paper="arXiv 2510.13161 (2025)",
        idea="While the target verifies, a smaller model continues each likely outcome.",
        family="draft model",
        needs=("draft model",),
        published="2.8x to 5.8x for models of 14B to 66B on 8 GPUs, with the draft model on 8 NPUs.",
        lacks={
            "mirror-sd": "outcomes are continued while the target verifies, as published; they are the draft model's "
            "own next choices and not read from an early layer of the target, the draft model makes one token per "
            "pass, and targets on accelerators are refused",
        },
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(7, 1, 256)  # tokens verified at most, as of draft-model; the paper varies it
    branches: int = knob(4, 0, 64)  # continued besides the whole draft; published: a few of each token
    serial: int = knob(7, 0, 256)  # tokens drafted before a pass for which fewer are ready; published `length`
    threads: int = knob(1, 1, 64)  # that draft while the pass runs, besides those of the target

    @property
    def expansions(self) -> int:
        return self.length + (1 + self.branches) * (1 + self.length)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        if growing.state is None:  # a draft that is made before the pass
            return super().grow(growing, nodes, laws)
        begun = 0 if growing.passes else len(growing.tokens) - 1  # those before have the next of the chain as a child
        added = [
            child
            for node, law in zip(nodes, laws, strict=True)
            if node >= begun
            for child in growing.add(node, self.chosen(growing, node, law), law)
        ]
        growing.end_level(added if growing.passes else added + self._corrections(growing, nodes, laws))

    def _corrections(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> list[int]:
        """Add the likeliest corrections: tokens other than those of a chain, each by the probability that the chain is
        right before it and it is right there.

        nodes: of the chain, from its root on. laws: (k, V) at these.
        """
        found: list[tuple[float, int, int]] = []
        right = 1.0
        for node, law in zip(nodes, laws, strict=True):
            shares = self.keys(growing, node, law)
            shares = shares / shares.sum()
            drafted = growing.tokens[node + 1] if node + 1 < len(growing.tokens) else -1
            values, tokens = shares.topk(min(self.branches + 1, len(shares)))
            found += [
                (right * share, -node, token)
                for share, token in zip(values.tolist(), tokens.tolist(), strict=True)
                if share > 0 and token != drafted
            ]
            right *= float(shares[drafted]) if drafted >= 0 else 0.0
        return [child for _, node, token in nlargest(self.branches, found) for child in growing.add(-node, [token])]
