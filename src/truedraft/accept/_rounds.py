"""Drafts judged at a node against the target's law: what the rejection rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from truedraft.accept._verification import Candidates
from truedraft.chance import Chance
from truedraft.tree import Row

# (law of the target, what is offered, row, chance) -> the draft that is kept, or None and the law to draw from instead
Verify = Callable[[Tensor, Candidates, Row, Chance], tuple[int | None, Tensor]]


def tokens_by(
    scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance, verify: Verify
) -> list[int]:
    """The next token of each row, -1 where its scores are NaN. scores: (k, V) processed scores."""
    laws, tokens = scores.softmax(-1), [-1] * len(rows)
    left: list[int] = []  # rows where no draft was kept, the law that is left in place of theirs
    broken = laws[:, 0].isnan().tolist()
    for i, (children, row) in enumerate(zip(candidates, rows, strict=True)):
        token, law = (None, laws[i]) if broken[i] else verify(laws[i], children, row, chance)
        if token is None:
            laws[i] = law
            left.append(i)
        else:
            tokens[i] = token
    if left:
        drawn = chance.pick(laws[left], [rows[i] for i in left])
        for i, token in zip(left, drawn, strict=True):
            tokens[i] = token
    return tokens


def in_order(most: int | None = None) -> Verify:
    """Drafts one after the other, each against what those before it left of the law; at most so many, or all."""
    return partial(_in_order, most)


def _in_order(most: int | None, p: Tensor, children: Candidates, row: Row, chance: Chance) -> tuple[int | None, Tensor]:
    q = None
    for i, token in enumerate(children.tokens[:most]):
        if i == children.fixed:
            q = children.dist
        drafted = 1.0 if q is None else float(q[token])
        odds = float(p[token])
        if odds > 0 and (odds >= drafted or chance.flip(odds / drafted, row)):
            return token, p
        p = _without(p, token) if q is None else as_law(p - q, p)
        if q is not None and children.draws == "distinct":
            q = _without(q, token)
    return None, p


def _without(law: Tensor, token: int) -> Tensor:
    return as_law(law.index_fill(0, torch.tensor([token], device=law.device), 0.0), law)


def as_law(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights brought to a sum of 1, those below 0 (rounding) counted as 0; or `otherwise` where all are 0.

    Nothing is left of a law only where drafts cover it wholly, and then none is refused.
    """
    weights = weights.clamp_min(0)
    total = weights.sum()
    return weights / total if total > 0 else otherwise
