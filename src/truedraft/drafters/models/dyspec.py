"""DySpec: a tree of sampled tokens that grows where the draft model expects acceptance, as the text requires it.

Xiong et al., "DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure", 2024 (arXiv 2410.11744). The
value of a place in the tree is the probability that it is reached and that its token is accepted, if acceptance is as
probable as the draft model's tokens are. Siblings are drawn without replacement: after a token of probability r, the
next sibling's value is the place's times 1 - r, and the token's own children have r times the value. Places are filled
in order of their values, level by level, as long as these are above `threshold` (algorithm 2 of the paper). Whether a
place is filled is decided before its token is drawn, so that `multi-round` verifies the tree exactly. Under `greedy`
and `seeded` the siblings are the likeliest tokens instead.

It wins over trees of fixed shape where the draft model is sure of some tokens and unsure of others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._shaped import ShapedDrafter
from truedraft.tree import Draws


@dataclass
class DySpec(ShapedDrafter):
    card = Card(
        paper="arXiv 2410.11744 (2024)",
        idea="A smaller model samples a tree whose shape follows the probability of its tokens.",
        family="draft model",
        needs=("draft model",),
        published="Llama 2 70B, offloaded: up to 9.1x throughput at low temperature, 6.21x at high.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    nodes: int = knob(24, 1, 1024)  # of the draft; published 64, offloaded 768 to 1024
    length: int = knob(8, 1, 64)  # levels
    threshold: float = knob(0.03, 0, 1)  # least value of a place that is filled; published: near 1 / nodes
    source: Any = None  # a drafter with distributions in the place of the model, such as eagle3, or its name

    @property
    def width(self) -> int:
        return self.nodes

    @property
    def levels(self) -> int:
        return self.length

    @property
    def draws(self) -> Draws:
        return "distinct"

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        drawn = self.preferred(growing.row) == "law"
        order = (
            [] if drawn else [self.chosen(growing, *pair, self.nodes)[::-1] for pair in zip(nodes, laws, strict=True)]
        )
        left = list(laws.unbind())
        places = [(-growing.score.get(node, 1.0), i) for i, node in enumerate(nodes) if laws[i].any()]
        heapq.heapify(places)
        added: list[int] = []
        while places and growing.room > 0 and -places[0][0] >= self.threshold:
            value, i = heapq.heappop(places)
            if drawn:
                (token,) = growing.row.request.chance.draw(left[i], growing.row)
            elif order[i]:
                token = order[i].pop()
            else:
                continue
            (child,) = growing.add(nodes[i], [token], laws[i])
            mass = float(left[i].sum())
            share = float(left[i][token]) / mass
            growing.score[child] = -value * share
            added.append(child)
            left[i] = left[i].clone()
            left[i][token] = 0.0
            if float(left[i].sum()) > 0:
                heapq.heappush(places, (value * (1 - share), i))
        growing.end_level([child for child in added if growing.score[child] >= self.threshold])
