"""The likeliest tokens at the nodes of a pass, for all who ask for them: each line of scores is read once at most."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_void_p, cast
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from truedraft.stores._native import library
from truedraft.stores._native import trees as compiled
from truedraft.stores.likeliest import lines
from truedraft.tree import DraftTree, Scores

COUNT = 8  # tokens that are found of a line
ODD = 2  # as in likeliest.c: the state of a line with NaN


class Ranks(Sequence[Sequence[int]]):
    """The `COUNT` likeliest tokens at every node, found when they are read: of a draft, few are.

    As a sequence: by row and node the index of the first largest score, -1 where one is NaN.

    Args:
        logits: (rows, nodes, V), which compiled code can read (`likeliest.lines`); they must not change.
    """

    def __init__(self, logits: Tensor):
        found = lines(logits)
        assert found is not None
        self._flat, count, self._width, self._stride = found
        self._nodes = logits.shape[1]
        empty = bytes(4 * count * COUNT)
        self._token, self._value = array("i", empty), array("f", empty)
        self._state = bytearray(count)
        self._firsts = list(range(0, count, self._nodes))  # the line of each row's root
        self._lines = (  # as in _trees.c
            _rank(), self._flat.data_ptr(), self._width, self._stride, COUNT, self._token, self._value, self._state,
        )  # fmt: skip

    def of(self, rows: Sequence[int]) -> Ranks:
        """Those of some rows, in this order; what is read of one is read of both."""
        part = object.__new__(type(self))
        vars(part).update(vars(self), _firsts=[self._firsts[row] for row in rows])
        return part

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, row: Any) -> Any:
        return _Row(self, self._firsts[row], self._nodes)

    def paths(self, trees: Sequence[DraftTree]) -> list[tuple[tuple[int, ...], int]]:
        """For each row's tree the path along which every token is the likeliest at its parent, probes left out, and the
        likeliest token at its end."""
        drafts = [(tuple(tree.tokens), tuple(tree.parent), tree.probes) for tree in trees]
        found: list[tuple[tuple[int, ...], int]] = compiled().walk(self._lines, self._firsts, drafts)
        return found

    def two_largest(self, paths: Sequence[tuple[int, ...]]) -> bytes:
        """The two largest scores, as floats, at each node of a path of each row, row after row."""
        found: bytes = compiled().highest(self._lines, self._firsts, list(paths))
        return found

    def recycle(self, trees: Sequence[DraftTree], table: np.ndarray) -> None:
        """Write the likeliest successors of every node's token, as many as a line of the table has places, into the
        line of that token: one more than each, the likeliest first, 0 where there are fewer. Tokens without a line, and
        nodes without a possible successor, change nothing; of the nodes of one token the last remains."""
        tokens = [tuple(tree.tokens) for tree in trees]
        compiled().recycle(self._lines, self._firsts, tokens, table, table.shape[1])

    def best(self, line: int) -> int:
        """The index of the first largest of a line's scores, -1 where one is NaN."""
        self._read(line)
        return -1 if self._state[line] == ODD else max(self._token[line * COUNT], 0)

    def _read(self, line: int) -> None:
        place, state = array("i", [line]), np.frombuffer(self._state, np.int8)
        library().truedraft_rank(  # type: ignore[union-attr]
            self._flat.data_ptr(), self._width, self._stride, place.buffer_info()[0], 1, COUNT,
            self._token.buffer_info()[0], self._value.buffer_info()[0], state.ctypes.data,
        )  # fmt: skip


class _Row(Sequence[int]):
    """The likeliest tokens at the nodes of one row."""

    def __init__(self, ranks: Ranks, first: int, nodes: int):
        self._ranks, self._first, self._nodes = ranks, first, nodes

    def __len__(self) -> int:
        return self._nodes

    def __getitem__(self, node: Any) -> Any:
        if not 0 <= node < self._nodes:
            raise IndexError(node)
        return self._ranks.best(self._first + node)


def ranks_of(scores: Scores) -> Ranks | None:
    """The ranks of a pass, or of some of its rows, shared by all who ask; None where compiled code cannot read them."""
    whole, rows = scores.part or (scores, None)
    ranks = vars(whole).get("ranks")
    if ranks is None:
        if compiled() is None or lines(whole.logits) is None or not whole.logits.numel():
            return None
        ranks = vars(whole)["ranks"] = Ranks(whole.logits)
    return ranks if rows is None else ranks.of(rows)


@cache
def _rank() -> int:
    """The address of the compiled form of `Ranks`."""
    return cast(library().truedraft_rank, c_void_p).value or 0  # type: ignore[union-attr]
