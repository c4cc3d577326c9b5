"""Lenient: rejection sampling with acceptance probabilities raised by a factor.

Leviathan, Kalman and Matias, ICML 2023 (arXiv 2211.17192), appendix A.5: drafts are verified as if their law was
`lenience` times q. Lossy: a token is emitted with at most 1/lenience times its probability under the model. With
lenience 1 it is `rejection`. Of siblings only the first is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from truedraft.accept._rounds import as_law, tokens_by
from truedraft.accept._verification import Candidates
from truedraft.accept.lossy._base import LossyNodeRule
from truedraft.card import Card, knob
from truedraft.chance import Chance
from truedraft.tree import PreferredDrafts, Row


@dataclass
class Lenient(LossyNodeRule):
    card = Card(
        paper="arXiv 2211.17192 (2023), appendix A.5",
        idea="Accept a drafted token with min(1, p/(l q)), with a lenience l below 1.",
        family="lossy",
        published="T5-XXL drafted by T5-small: acceptance 0.62 at l 1, 0.71 at 0.5, 0.76 at 0.3, 0.84 at 0.1 (memory).",
    )
    samples: ClassVar[bool] = True
    preferred_drafts: ClassVar[PreferredDrafts] = "law"
    lenience: float = knob(0.5, 0, 1, open=True)  # published 1 (exact) down to 0.1

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        return tokens_by(scores, candidates, rows, chance, self._verified)

    def _verified(self, p: Tensor, children: Candidates, row: Row, chance: Chance) -> tuple[int | None, Tensor]:
        if not children.tokens:
            return None, p
        token = children.tokens[0]
        q = children.dist if not children.fixed else None
        if q is None:
            q = torch.zeros_like(p).index_fill_(0, torch.tensor([token], device=p.device), 1.0)
        if chance.flip(min(float(p[token]) / (self.lenience * float(q[token])), 1.0), row):
            return token, p
        return None, as_law(p - self.lenience * q, p)
