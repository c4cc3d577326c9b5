"""Greedy multi-draft: optimal verification of siblings of which all but the last are certain.

Hu et al., "Towards Optimal Multi-Draft Speculative Decoding", ICLR 2025 (arXiv 2502.18779), section 4: the drawn child
is accepted with min(1, p/q), else the token is drawn from the residual law, and may be one of the certain children. A
child is emitted with probability p(certain) + sum over the others of min(p, q), the optimum for such drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from truedraft.accept._base import NodeRule
from truedraft.accept._rounds import as_law, tokens_by
from truedraft.accept._verification import Candidates
from truedraft.card import Card, Guarantee
from truedraft.chance import Chance
from truedraft.tree import Draws, PreferredDrafts, Row


@dataclass
class GreedyMultiDraft(NodeRule):
    card = Card(
        paper="arXiv 2502.18779 (2025)",
        idea="Accept the one drawn child with min(1, p/q); else draw from the residual law, perhaps a certain child.",
        family="rejection",
        published="Acceptance above recursive rejection and K-SEQ at equal numbers of drafts.",
    )
    guarantee: ClassVar[Guarantee] = "distribution"
    samples: ClassVar[bool] = True
    preferred_drafts: ClassVar[PreferredDrafts] = "law"
    accepts_draws: ClassVar[frozenset[Draws]] = frozenset({"certain", "one", "last"})

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        return tokens_by(scores, candidates, rows, chance, _last)


def _last(p: Tensor, children: Candidates, row: Row, chance: Chance) -> tuple[int | None, Tensor]:
    """The drawn child if it is accepted, else None and the residual law. p: (V,) the target's law."""
    q = children.dist
    if q is None or not children.tokens:
        return None, p
    token = children.tokens[-1]
    if chance.flip(min(float(p[token]) / float(q[token]), 1.0), row):
        return token, p
    return None, as_law(p - q, p)
