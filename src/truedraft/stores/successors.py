"""What was last thought likely after each token, and trees of such successors: compiled, or here in Python."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from truedraft.stores._native import library
from truedraft.stores._native import trees as compiled
from truedraft.stores.likeliest import MOST, likeliest

Grown = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # tokens, parents, confidence
Growing = Callable[..., Grown]


class Template(NamedTuple):
    """The nodes of a tree below its root, in the order in which they are taken.

    parents: of each, counted with the root as 0. ranks: which of its parent's successors it is. confidence: the chance
        of each that it is right if its parent is.
    """

    parents: Sequence[int]
    ranks: Sequence[int]
    confidence: Sequence[float]


class Successors:
    """The likeliest successors of every token that was seen.

    Memory is taken as tokens are seen: 4 bytes for each successor, in pages of the system's.

    Args:
        count: kept for each token.
    """

    def __init__(self, count: int):
        self.count = count
        self._table = np.zeros((0, count), np.int32)  # successors + 1, the likeliest first; 0: none

    def of(self, token: int) -> list[int]:
        if not 0 <= token < len(self._table):
            return []
        return [int(one) - 1 for one in self._table[token] if one]

    def learn(self, tokens: Sequence[int], scores: Tensor) -> None:
        """What followed each of `tokens` now.

        scores: (len(tokens), V); a row without a possible token changes nothing.

        Raises:
            ValueError: not a row for each token.
        """
        if len(tokens) != len(scores):
            raise ValueError(f"{len(tokens)} tokens, and scores of {len(scores)}")
        if (most := max(scores.shape[-1], max(tokens) + 1)) > len(self._table):
            known, self._table = self._table, np.zeros((most, self.count), np.int32)
            self._table[: len(known)] = known
        lib = library()
        plain = scores.dtype == torch.float32 and scores.device.type == "cpu" and scores.stride(-1) == 1
        if lib is not None and plain and self.count <= min(MOST, scores.shape[-1]):
            given = array("i", tokens)
            lib.truedraft_succeed(
                scores.data_ptr(), *scores.shape, scores.stride(0), self.count,
                given.buffer_info()[0], self._table.ctypes.data, len(self._table),
            )  # fmt: skip
            return
        for token, best in zip(tokens, likeliest(scores, self.count), strict=True):
            if best:
                self._table[token] = 0
                self._table[token, : len(best)] = np.array(best) + 1

    def tree(self, root: int, budget: int, template: Template) -> Grown:
        """The first `budget` nodes of a template that there are successors for."""
        native = compiled()
        grow: Growing = grown if native is None else native.grown
        return grow(self._table, self.count, root, budget, *template)


def grown(
    table: np.ndarray, count: int, root: int, budget: int,
    parents: Sequence[int], ranks: Sequence[int], confidence: Sequence[float],
) -> Grown:  # fmt: skip
    """As in `_trees.c`."""
    tokens, above, chances = [root], [-1], [1.0]
    places = [0]  # of the template's nodes in the tree, -1 where there is no such successor
    for parent, rank, hope in zip(parents, ranks, confidence, strict=True):
        if len(tokens) > budget:
            break
        below = places[parent]
        known = below >= 0 and tokens[below] < len(table) and rank < count and table[tokens[below]][rank]
        if known:
            places.append(len(tokens))
            tokens.append(int(known) - 1)
            above.append(below)
            chances.append(hope)
        else:
            places.append(-1)
    return tuple(tokens), tuple(above), tuple(chances)
