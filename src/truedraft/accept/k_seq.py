"""K-SEQ: verifies independent drafts one after the other, with acceptance scaled so that all k can be tried.

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023 (arXiv 2310.15141), algorithm 2.
Each of k drafts from q is accepted with min(1, p / (g q)); g, between 1 and k, is the least for which the residual law
is not negative. Accepts at least 1 - 1/e of what the best rule for k independent drafts does. With one draft it is
`rejection`.
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

STEPS, CLOSE = 60, 1e-7  # most iterations of the search for g; its tolerance


@dataclass
class KSeq(NodeRule):
    card = Card(
        paper="arXiv 2310.15141 (2023)",
        idea="Accept each of k independent drafts with min(1, p/(g q)), with the least g for which k can be tried.",
        family="rejection",
        published="PaLM 2 Bison drafted by Gecko on LM1B, 8 continuations of 8: 2.13x (single draft 1.55x).",
    )
    guarantee: ClassVar[Guarantee] = "distribution"
    samples: ClassVar[bool] = True
    preferred_drafts: ClassVar[PreferredDrafts] = "law"
    accepts_draws: ClassVar[frozenset[Draws]] = frozenset({"one", "independent"})

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        return tokens_by(scores, candidates, rows, chance, _tried)


def _tried(p: Tensor, children: Candidates, row: Row, chance: Chance) -> tuple[int | None, Tensor]:
    """The first draft that is accepted, or None and the residual law. p: (V,) the target's law."""
    q, k = children.dist, len(children.tokens)
    if q is None or not k:
        return None, p
    g = _least(p, q, k)
    for token in children.tokens:
        if chance.flip(min(float(p[token]) / (g * float(q[token])), 1.0), row):
            return token, p
    shared = q.minimum(p / g)
    kept = min(float(shared.sum()), 1.0)
    return None, as_law(p - shared * (_any(kept, k) / kept if kept > 0 else 0.0), p)


def _least(p: Tensor, q: Tensor, k: int) -> float:
    """The least g with 1 - (1 - b)^k <= g b, where b = sum of min(q, p/g) is the acceptance of one draft.

    Found between 1 and k by regula falsi with halved weights (the Illinois method).
    """

    def beyond(g: float) -> float:
        kept = min(float(q.minimum(p / g).sum()), 1.0)
        return _any(kept, k) - g * kept

    low, high = 1.0, float(k)
    above, below = (beyond(low), beyond(high)) if k > 1 else (0.0, 0.0)
    if above <= 0:
        return low
    for _ in range(STEPS):
        g = high - below * (high - low) / (below - above) if below < 0 else high
        if high - low < CLOSE or not low < g < high:
            break
        value = beyond(g)
        if value > 0:
            low, above, below = g, value, below / 2
        else:
            high, below, above = g, value, above / 2
    return high


def _any(kept: float, k: int) -> float:
    """The probability that any of k drafts is accepted, each with `kept`."""
    return 1 - (1 - kept) ** k
