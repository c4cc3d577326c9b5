"""Pairs of source and target tokens, in batches of similar lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

Pair = tuple[list[int], list[int]]


def bucketed(
    pairs: Iterator[Pair], tokens: int, seed: int, longest: int = 120, pool: int = 2048
) -> Iterator[list[Pair]]:
    """Groups of pairs of similar lengths, `tokens` positions each with padding, in random order.

    Args:
        pairs: source and target ids, endless.
        tokens: positions of a group, on the longer side.
        longest: pairs with a side longer than this are left out.
        pool: pairs that are sorted together.
    """
    rng = random.Random(seed)
    while True:
        drawn = [pair for pair in (next(pairs) for _ in range(pool)) if max(map(len, pair)) <= longest]
        drawn.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        groups: list[list[Pair]] = [[]]
        widest = 0
        for pair in drawn:
            widest = max(widest, *map(len, pair))
            if groups[-1] and widest * (len(groups[-1]) + 1) > tokens:
                groups.append([])
                widest = max(map(len, pair))
            groups[-1].append(pair)
        rng.shuffle(groups)
        yield from filter(None, groups)


def pad_to(rows: list[list[Any]], value: float) -> torch.Tensor:
    """(rows, longest row), padded at the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def shuffled(items: list[Pair], seed: int) -> Iterator[Pair]:
    """All items, endlessly, in a new random order each time."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(items, len(items))
