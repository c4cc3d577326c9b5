"""PEARL: the draft model goes on drafting while the target verifies, so that neither waits for the other.

Liu et al., "PEARL: Parallel Speculative Decoding with Adaptive Draft Length", ICLR 2025 (arXiv 2408.11850). While a
pass verifies a draft, the draft model continues behind it, as if all of it were accepted and the bonus token were its
own next token; where that comes true, the next draft is there at once (post-verify). Else the next pass has no draft,
and the draft model begins one meanwhile, whose first token the pass decides (pre-verify). So drafts are as long as a
pass takes; where the rule verifies drafts against the law that they were drawn from, of `length` tokens. It wins where
the draft model is often right for many tokens, is many times faster than the target, and has cores or a device of its
own; where both compete for the same cores, or drafts are often wrong, `draft-model` is better. With `serial` above 0
the passes after a rejection have drafts too, as in `draft-model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.models._overlapping import OverlappingDrafter


@dataclass
class Pearl(OverlappingDrafter):
    card = Card(
        paper="arXiv 2408.11850 (2025)",
        idea="A smaller model drafts on while the target verifies.",
        family="draft model",
        needs=("draft model",),
        published="Up to 3.79x, and 1.52x the speed of draft-model, with each model on a GPU of its own.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(7, 1, 256)  # tokens verified at most; published: the ratio of the times of both models' passes
    serial: int = knob(0, 0, 256)  # tokens drafted before a pass for which fewer are ready; published 0
    threads: int = knob(1, 1, 64)  # that draft while the pass runs, besides those of the target

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        if nodes[-1] == len(growing.tokens) - 1:
            super().grow(growing, nodes[-1:], laws[-1:])
        else:  # the last token may have no children
            growing.end_level([])
