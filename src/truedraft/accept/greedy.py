"""Greedy: chooses the likeliest token at every node; a draft is accepted as far as it agrees.

Stern et al., "Blockwise Parallel Decoding", NeurIPS 2018 (arXiv 1811.03115), section 3.
The same tokens as plain greedy decoding, with any drafter and any tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from truedraft.accept._base import ArgmaxRule
from truedraft.accept._verification import Candidates
from truedraft.card import Card, Guarantee
from truedraft.chance import Chance
from truedraft.sampling import Laws
from truedraft.stores.likeliest import largest
from truedraft.stores.ranks import ranks_of
from truedraft.tree import DraftTree, PreferredDrafts, Row, Scores


@dataclass
class Greedy(ArgmaxRule):
    card = Card(
        paper="arXiv 1811.03115 (2018)",
        idea="Keep drafted tokens for as long as each is the target's own likeliest next token.",
        family="exact match",
    )
    guarantee: ClassVar[Guarantee] = "tokens"
    samples: ClassVar[bool] = False
    preferred_drafts: ClassVar[PreferredDrafts] = "likeliest"

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        return largest(scores)

    def keys(self, scores: Tensor, chance: Chance) -> Tensor:
        return scores

    def decide_all_nodes(
        self, scores: Scores, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> Sequence[Sequence[int]] | None:
        if not laws.raw:
            return None
        return largest(scores.logits) if (ranks := ranks_of(scores)) is None else ranks
