"""Verification of a node's children against the target's law: what the rejection rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from truedraft.accept._verification import Candidates
from truedraft.chance import Chance
from truedraft.tree import Row

# (the target's law, the children, row, chance) -> the accepted token, or None and the law to draw from instead
Verify = Callable[[Tensor, Candidates, Row, Chance], tuple[int | None, Tensor]]


def tokens_by(
    scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance, verify: Verify
) -> list[int]:
    """The next token of each row, -1 where its scores are NaN. scores: (k, V) processed scores."""
    laws, tokens = scores.softmax(-1), [-1] * len(rows)
    rejected: list[int] = []  # rows without an accepted child; in `laws` their residual law
    invalid = laws[:, 0].isnan().tolist()
    for i, (children, row) in enumerate(zip(candidates, rows, strict=True)):
        token, law = (None, laws[i]) if invalid[i] else verify(laws[i], children, row, chance)
        if token is None:
            laws[i] = law
            rejected.append(i)
        else:
            tokens[i] = token
    if rejected:
        drawn = chance.pick(laws[rejected], [rows[i] for i in rejected])
        for i, token in zip(rejected, drawn, strict=True):
            tokens[i] = token
    return tokens


def in_order(count: int | None = None) -> Verify:
    """Verify the first `count` children, or all, one after the other, each against the residual law of those before."""
    return partial(_in_order, count)


def _in_order(
    count: int | None, p: Tensor, children: Candidates, row: Row, chance: Chance
) -> tuple[int | None, Tensor]:
    q = None
    for i, token in enumerate(children.tokens[:count]):
        if i == children.fixed:
            q = children.dist
        q_token = 1.0 if q is None else float(q[token])
        p_token = float(p[token])
        if p_token > 0 and (p_token >= q_token or chance.flip(p_token / q_token, row)):
            return token, p
        p = _without(p, token) if q is None else as_law(p - q, p)
        if q is not None and children.draws == "distinct":
            q = _without(q, token)
    return None, p


def _without(law: Tensor, token: int) -> Tensor:
    return as_law(law.index_fill(0, torch.tensor([token], device=law.device), 0.0), law)


def as_law(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights normalised to a sum of 1, negative ones (rounding) as 0; `otherwise` where all are 0.

    A residual law is 0 everywhere only if the draft's law covers the target's, and then no child is refused.
    """
    weights = weights.clamp_min(0)
    total = weights.sum()
    return weights / total if total > 0 else otherwise
