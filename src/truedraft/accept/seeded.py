"""Seeded: chooses the token that plain sampling under the seed would draw; a draft is accepted as far as it agrees.

The noise of a step does not depend on drafts, so the text is that of plain sampling under the same seed
(`torch.manual_seed` and `model.generate`, token for token), and its law is the target's. Acceptance by comparison with
the target's own sample: Leviathan et al., arXiv 2211.17192, section 3.5, in the strict form; it accepts less often than
rejection sampling if drafts are sampled, and exactly as often if they are certain (lookup).
"""

from __future__ import annotations

import math
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
from truedraft.tree import DraftTree, PreferredDrafts, Row, Scores


@dataclass
class Seeded(ArgmaxRule):
    card = Card(
        paper="arXiv 2211.17192 (2023)",
        idea="Keep drafted tokens for as long as each is the token that the target draws there with this seed.",
        family="exact match",
    )
    guarantee: ClassVar[Guarantee] = "tokens"
    samples: ClassVar[bool] = True
    preferred_drafts: ClassVar[PreferredDrafts] = "noise"

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        return chance.pick(scores.softmax(-1), rows)

    def keys(self, scores: Tensor, chance: Chance) -> Tensor | None:
        return getattr(chance, "keys", None)  # a caller's source of noise may not have them

    def floor(self, best: Tensor, margin: float) -> Tensor:
        return best * math.exp(-margin)

    def decide_all_nodes(
        self, scores: Scores, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> Sequence[Sequence[int]] | None:
        noise = chance.noise_at_nodes(scores.logits, rows, trees) if laws.apart else None
        if noise is None:
            return None
        chance.keys = laws.everywhere(scores.logits).softmax(-1) / noise
        return largest(chance.keys)
