"""Tokens to draft, ranked by the rule of their row: by the drafter's distributions, or with the target's noise too."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from truedraft.drafters._base import Drafter
from truedraft.tree import Row


def keys_of(drafter: Drafter, row: Row, laws: Tensor, after: Sequence[int]) -> Tensor:
    """(k, V): of two tokens that with the larger key is likelier to be the target's.

    With the target's own noise where the row's rule draws by it, else the distributions.

    Args:
        laws: (k, V) distributions, each after as many drafted tokens as `after` gives.
    """
    request = row.request
    if drafter.preferred(row) == "noise" and not request.laws.unknown_processors:
        return request.chance.target_keys(laws, row, after)
    return laws


def candidates(
    drafter: Drafter, row: Row, laws: Tensor, after: Sequence[int], count: int
) -> list[list[tuple[int, float]]]:  # fmt: skip
    """For each law the `count` tokens with the largest keys, in order, with the probability that each is right.

    That is its share of the keys: exact where the logits of the target are those of the law plus independent standard
    Gumbel noise, and calibrated by the caller. See `keys_of`.
    """
    keys = keys_of(drafter, row, laws, after)
    values, tokens = keys.topk(min(count, keys.shape[1]))
    if keys is not laws:
        values = (values / keys.sum(-1, keepdim=True)).nan_to_num_(0.0)
    return [
        [(token, p) for token, p in zip(some, chances, strict=True) if p > 0]
        for some, chances in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
