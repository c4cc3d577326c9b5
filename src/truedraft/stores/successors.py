"""The successors of each token that were last predicted, and trees grown from them: compiled, or here in Python."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from truedraft.stores._native import library
from truedraft.stores._native import trees as compiled
from truedraft.stores.likeliest import MOST, likeliest, lines
from truedraft.stores.ranks import COUNT, ranks_of
from truedraft.tree import DraftTree, Scores

TreeArrays = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # tokens, parents, confidence
GrowTree = Callable[..., TreeArrays]


class Template(NamedTuple):
    """The nodes of a tree below its root, in the order in which they are added.

    parents: of each, the root being 0. ranks: of each among its parent's successors, 0 the likeliest. confidence: of
        each, the probability that it is accepted if its parent is.
    """

    parents: Sequence[int]
    ranks: Sequence[int]
    confidence: Sequence[float]


class Successors:
    """The likeliest successors of every token observed.

    Memory grows with the tokens observed: 4 bytes per successor, in pages of the operating system.

    Args:
        count: successors kept for each token.
    """

    def __init__(self, count: int):
        self.count = count
        self._table = np.zeros((0, count), np.int32)  # successors + 1, the likeliest first; 0: none

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def of(self, token: int) -> list[int]:
        if not 0 <= token < len(self._table):
            return []
        return [int(one) - 1 for one in self._table[token] if one]

    def learn(self, tokens: Sequence[int], scores: Tensor) -> None:
        """Replace the successors of each of `tokens` by those of new scores.

        tokens: -1 for scores that are left out.
        scores: (..., V), as many rows as tokens; a row without a possible token changes nothing.

        Raises:
            ValueError: not a row for each token.
        """
        if len(tokens) * scores.shape[-1] != scores.numel():
            raise ValueError(f"{len(tokens)} tokens, and scores of {scores.numel() // scores.shape[-1]}")
        self._reserve(max(scores.shape[-1], max(tokens) + 1))
        found = lines(scores) if self.count <= min(MOST, scores.shape[-1]) else None
        if found is not None:
            (flat, *sizes), given = found, array("i", tokens)
            library().truedraft_succeed(  # type: ignore[union-attr]
                flat.data_ptr(), *sizes, self.count, given.buffer_info()[0], self._table.ctypes.data, len(self._table)
            )
            return
        for token, best in zip(tokens, likeliest(scores.flatten(0, -2), self.count), strict=True):
            if best and token >= 0:
                self._table[token] = 0
                self._table[token, : len(best)] = np.array(best) + 1

    def learn_pass(self, trees: Sequence[DraftTree], scores: Scores) -> None:
        """`learn` the tokens of all nodes of a pass, whose scores are not read again where that has been done."""
        ranks = ranks_of(scores) if self.count <= COUNT else None
        if ranks is not None:
            self._reserve(max(scores.logits.shape[-1], *[max(tree.tokens) + 1 for tree in trees]))
            ranks.recycle(trees, self._table)
        else:
            width = scores.logits.shape[1]
            padded = [token for tree in trees for token in (*tree.tokens, *[-1] * (width - len(tree)))]
            self.learn(padded, scores.logits)

    def _reserve(self, tokens: int) -> None:
        """Have a line in the table for so many tokens."""
        if tokens > len(self._table):
            smaller, self._table = self._table, np.zeros((tokens, self.count), np.int32)
            self._table[: len(smaller)] = smaller

    def tree(self, root: int, budget: int, template: Template) -> TreeArrays:
        """The first `budget` nodes of a template that there are successors for."""
        native = compiled()
        grow: GrowTree = grown if native is None else native.grown
        return grow(self._table, self.count, root, budget, *template)


def grown(
    table: np.ndarray, count: int, root: int, budget: int,
    parents: Sequence[int], ranks: Sequence[int], confidence: Sequence[float],
) -> TreeArrays:  # fmt: skip
    """As in `_trees.c`."""
    tokens, above, chances = [root], [-1], [1.0]
    places = [0]  # indices of the template's nodes in the tree, -1 where there is no such successor
    for parent, rank, chance in zip(parents, ranks, confidence, strict=True):
        if len(tokens) > budget:
            break
        below = places[parent]
        entry = below >= 0 and tokens[below] < len(table) and rank < count and table[tokens[below]][rank]
        if entry:
            places.append(len(tokens))
            tokens.append(int(entry) - 1)
            above.append(below)
            chances.append(chance)
        else:
            places.append(-1)
    return tuple(tokens), tuple(above), tuple(chances)
