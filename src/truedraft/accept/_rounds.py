"""Siblings judged one after the other against what is left of the target's law: behind the rejection rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.accept._base import Offer
from truedraft.chance import Chance
from truedraft.tree import Row


def judged(
    scores: Tensor, offers: Sequence[Offer], rows: Sequence[Row], chance: Chance, most: int | None = None
) -> list[int]:
    """The next token of each row, -1 where its scores are NaN: an accepted child's, else of what is left of the law.

    scores: (k, V) processed scores. most: children of a node that are judged; None for all.
    """
    laws, tokens = scores.softmax(-1), [-1] * len(rows)
    left: list[int] = []  # rows where no child was accepted, the law that is left in place of theirs
    for i, (offer, row) in enumerate(zip(offers, rows, strict=True)):
        token, law = _round(laws[i], offer, row, chance, most)
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


def _round(p: Tensor, offer: Offer, row: Row, chance: Chance, most: int | None) -> tuple[int | None, Tensor]:
    """The first accepted child's token, or None and the law that is left. p: (V,)."""
    q = None
    for i, token in enumerate(offer.tokens[:most]):
        if i == offer.fixed:
            q = offer.dist
        drafted = 1.0 if q is None else float(q[token])
        odds = float(p[token])
        if odds != odds:  # NaN: for the pick to find
            return None, p
        if odds > 0 and (odds >= drafted or chance.flip(odds / drafted, row)):
            return token, p
        p = _beyond(p, token, q)
        if q is not None and offer.draws == "distinct":
            q = _without(q, token)
    return None, p


def _beyond(p: Tensor, token: int, q: Tensor | None) -> Tensor:
    """What of `p` the law `q` (certain of `token` where None) does not cover, as a law."""
    if q is None:
        return _without(p, token)
    return _law((p - q).clamp_min(0), p)  # nothing is left only where p is q, and then nothing is refused


def _without(law: Tensor, token: int) -> Tensor:
    return _law(law.index_fill(0, torch.tensor([token], device=law.device), 0.0), law)


def _law(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights brought to a sum of 1, or `otherwise` where all are 0."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise
