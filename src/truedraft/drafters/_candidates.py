"""Tokens to draft, ranked by the rule of their row: by the drafter's distributions, or with the target's noise too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from truedraft.drafters._base import Drafter
from truedraft.tree import Row


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The tokens that a drafter predicts.

    size: V of the target. ids: (n,) those predicted, ascending; None for all.
    """

    size: int
    ids: Tensor | None = None

    @cached_property
    def listed(self) -> list[int] | None:
        """`ids` as a list."""
        return None if self.ids is None else self.ids.tolist()

    def spread(self, logits: Tensor) -> Tensor:
        """(..., n) logits as (..., V) ones, minus infinity at other tokens."""
        if self.ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        wide[..., self.ids] = logits
        return wide

    def suffices(self, rows: Sequence[Row]) -> bool:
        """Whether distributions of drafts for these rows may be computed over its tokens alone: fewer than V, and no
        processor that needs the ids of tokens."""
        return self.ids is not None and all(row.request.laws.drafts_pointwise for row in rows)


def keys_of(
    drafter: Drafter, row: Row, laws: Tensor, after: Sequence[int], vocabulary: DraftVocabulary | None = None
) -> Tensor:
    """(k, n): of two tokens that with the larger key is likelier to be the target's.

    With the target's own noise where the row's rule draws by it, else the distributions.

    Args:
        laws: (k, n) distributions, each after as many drafted tokens as `after` gives.
        vocabulary: the n tokens, where they are not all.
    """
    request = row.request
    if drafter.preferred(row) != "noise" or request.laws.unknown_processors:
        return laws
    like = laws if vocabulary is None else laws[:1, :1].expand(1, vocabulary.size)
    noise = request.chance.target_noise(row, after, like)
    if noise is None:
        return laws
    return laws / (noise if vocabulary is None else noise[:, vocabulary.ids])


def candidates(
    drafter: Drafter, row: Row, laws: Tensor, after: Sequence[int], count: int,
    vocabulary: DraftVocabulary | None = None,
) -> list[list[tuple[int, float]]]:  # fmt: skip
    """For each law the `count` tokens with the largest keys, in order, with the probability that each is right.

    That is its share of the keys: exact where the logits of the target are those of the law plus independent standard
    Gumbel noise, and calibrated by the caller. See `keys_of`.
    """
    if vocabulary is not None and laws.shape[1] == vocabulary.size:
        vocabulary = None
    keys = keys_of(drafter, row, laws, after, vocabulary)
    values, tokens = keys.topk(min(count, keys.shape[1]))
    if keys is not laws:
        values = (values / keys.sum(-1, keepdim=True)).nan_to_num_(0.0)
    if vocabulary is not None and vocabulary.ids is not None:
        tokens = vocabulary.ids[tokens]
    return [
        [(token, p) for token, p in zip(some, chances, strict=True) if p > 0]
        for some, chances in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
