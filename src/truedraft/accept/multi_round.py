"""Multi-round: verifies siblings one after the other; each is accepted, or its law subtracted from the target's.

Recursive rejection sampling: Miao et al., "SpecInfer", 2023 (arXiv 2305.09781), section 4.3, for siblings drawn
independently; Jeon et al., "Recursive Speculative Decoding", 2024 (arXiv 2402.14160), theorem 3.1, and Yang et al.
(arXiv 2401.06706) for siblings drawn without replacement, which accepts more. Certain children (lookup) are point
masses, for which no rule accepts more. With one child per node it is `rejection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from truedraft.accept._base import NodeRule
from truedraft.accept._rounds import in_order, tokens_by
from truedraft.accept._verification import Candidates
from truedraft.card import Card, Guarantee
from truedraft.chance import Chance
from truedraft.tree import PreferredDrafts, Row


@dataclass
class MultiRound(NodeRule):
    card = Card(
        paper="arXiv 2305.09781 (2023)",
        idea="Accept each sibling with min(1, p/q); after a rejection verify the next against the residual law.",
        family="rejection",
        also={
            "specinfer": "its verification of trees is rule='multi-round'; draft='gumbel-top-k:model=NAME' draws trees "
            "for it, and a '+' between drafters merges theirs",
            "recursive-rejection-sampling": "",
        },
    )
    guarantee: ClassVar[Guarantee] = "distribution"
    samples: ClassVar[bool] = True
    preferred_drafts: ClassVar[PreferredDrafts] = "law"

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        return tokens_by(scores, candidates, rows, chance, in_order())
