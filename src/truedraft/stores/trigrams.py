"""Trigram weights in bounded memory, and a tree search over them: compiled (`trigrams.c`), or here in Python."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from ctypes import byref, c_double, c_int32
from typing import NamedTuple, Protocol

from truedraft.stores._native import TrigramTable, library

WAYS = 8  # rows of a set of the compiled table
KEPT = 12  # successors of a row, at most
TREE = 4096  # nodes of a search, at most
ROW = 16 + 8 * KEPT  # bytes of a row of the compiled table


class Searched(NamedTuple):
    """The most visited nodes: tokens, the parent of each (-1 the root), its trigram's fraction of the row's weight."""

    tokens: list[int]
    parents: list[int]
    shares: list[float]


class Trigrams(Protocol):
    """For every pair of tokens the twelve successors of most weight; the least recently used pairs are replaced."""

    @property
    def nbytes(self) -> int:
        """Memory of its rows, approximately, in bytes."""

    def weigh(self, tokens: Sequence[int], weight: float, most: float) -> None:
        """Add `weight` to every trigram of a run of tokens, up to `most`."""

    def copy(self) -> Trigrams:
        """Another table with the same contents."""

    def search(self, before: int, last: int, simulations: int, depth: int, c1: float, c2: float, most: int) -> Searched:
        """The `most` most visited nodes of a Monte-Carlo tree search from two tokens on; see `aded`."""


class CompiledTrigrams:
    """The compiled table."""

    def __init__(self, rows: int, like: CompiledTrigrams | None = None):
        lib = library()
        assert lib is not None
        self._lib, self._table, self._rows = lib, TrigramTable(), rows
        sets = 1 << max((rows // WAYS - 1).bit_length(), 0)
        self.nbytes = sets * WAYS * ROW
        here = byref(self._table)
        if not (lib.truedraft_table_copy(here, byref(like._table)) if like else lib.truedraft_table(here, sets)):
            raise MemoryError(f"no memory for {rows} rows of trigrams")

    def copy(self) -> CompiledTrigrams:
        return CompiledTrigrams(self._rows, self)

    def __del__(self) -> None:
        if "_table" in vars(self):  # else Ctrl-C interrupted its initialisation
            self._lib.truedraft_table_free(byref(self._table))

    def weigh(self, tokens: Sequence[int], weight: float, most: float) -> None:
        given = array("i", tokens)
        self._lib.truedraft_weigh(byref(self._table), given.buffer_info()[0], len(given), weight, most)

    def search(self, before: int, last: int, simulations: int, depth: int, c1: float, c2: float, most: int) -> Searched:
        tokens, parents, shares = (c_int32 * most)(), (c_int32 * most)(), (c_double * most)()
        n = self._lib.truedraft_search(
            byref(self._table), before, last, simulations, depth, c1, c2, most, tokens, parents, shares
        )
        return Searched(tokens[:n], parents[:n], shares[:n])


class _Node:
    def __init__(self, token: int, before: int, parent: _Node | None, weight: float = 0.0, share: float = 0.0):
        self.token, self.before, self.parent, self.weight, self.share = token, before, parent, weight, share
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: list[_Node] | None = None
        self.visits, self.value, self.place = 0, 0.0, -2


class PythonTrigrams:
    """The table and the search in Python."""

    def __init__(self, rows: int):
        self._room = rows
        self._rows: OrderedDict[tuple[int, int], list[list[float]]] = OrderedDict()  # [token, weight], heaviest first

    @property
    def nbytes(self) -> int:
        return 16 * ROW * len(self._rows)

    def copy(self) -> PythonTrigrams:
        return deepcopy(self)

    def weigh(self, tokens: Sequence[int], weight: float, most: float) -> None:
        for first, second, third in zip(tokens, tokens[1:], tokens[2:], strict=False):
            if min(first, second, third) < 0:
                continue
            row = self._rows.setdefault((first, second), [])
            self._rows.move_to_end((first, second))
            if len(self._rows) > self._room:
                self._rows.popitem(last=False)
            entry = next((e for e in row if e[0] == third), None)
            if entry is None:
                if len(row) == KEPT:
                    row.pop()
                entry = [third, 0.0]
                row.append(entry)
            entry[1] = min(_single(entry[1] + _single(weight)), _single(most))
            row.sort(key=lambda e: -e[1])
            while (at := row.index(entry)) and row[at - 1][1] < entry[1]:
                row[at - 1], row[at] = entry, row[at - 1]

    def search(self, before: int, last: int, simulations: int, depth: int, c1: float, c2: float, most: int) -> Searched:
        root = _Node(last, before, None)
        tree, random = [root], _Random((before << 32 | last) * 0x9E3779B97F4A7C15 | 1)
        for _ in range(simulations):
            at = root
            while at.children and at.depth < depth:
                wide = (c1 + math.log((at.visits + c2 + 1) / c2)) * math.sqrt(at.visits)
                at = max(
                    at.children,
                    key=lambda n: (n.value / n.visits if n.visits else 0.0) + wide * n.share / (1 + n.visits),
                )
            if at.children is None and at.depth < depth:
                at.children = self._expanded(at, len(tree))
                tree += at.children
            reward = self._rolled(at, depth, random)
            node: _Node | None = at
            while node is not None:
                node.visits += 1
                node.value += reward
                node = node.parent
        return _most_visited(tree, most)

    def _expanded(self, at: _Node, size: int) -> list[_Node]:
        row = self._rows.get((at.before, at.token), [])
        if size + len(row) > TREE:
            return []
        total = sum(weight for _, weight in row)
        return [_Node(int(token), at.token, at, weight, weight / total) for token, weight in row]

    def _rolled(self, at: _Node, depth: int, random: _Random) -> float:
        reward, node = 1.0, at
        while node.parent is not None:
            reward += node.weight
            node = node.parent
        before, token = at.before, at.token
        for _ in range(at.depth, depth):
            if not (row := self._rows.get((before, token))):
                break
            left = random.next() * sum(weight for _, weight in row)
            i = 0
            while i + 1 < len(row) and left >= row[i][1]:
                left -= row[i][1]
                i += 1
            reward += row[i][1]
            before, token = token, int(row[i][0])
        return reward


class _Random:
    """The random generator of trigrams.c, xorshift."""

    def __init__(self, state: int):
        self.state = state & (1 << 64) - 1

    def next(self) -> float:
        for left, right in ((13, 0), (0, 7), (17, 0)):
            self.state ^= (self.state << left if left else self.state >> right) & (1 << 64) - 1
        return (self.state >> 11) / 2**53


def _most_visited(tree: Sequence[_Node], most: int) -> Searched:
    found = Searched([], [], [])
    tree[0].place = -1
    while len(found.tokens) < most:
        open_ = [n for n in tree[1:] if n.place == -2 and n.parent is not None and n.parent.place != -2 and n.visits]
        if not open_:
            break
        best = max(open_, key=lambda n: n.visits)
        assert best.parent is not None
        best.place = len(found.tokens)
        found.tokens.append(best.token)
        found.parents.append(best.parent.place)
        found.shares.append(best.share)
    return found


def _single(x: float) -> float:
    return array("f", [x])[0]


def trigrams(rows: int) -> Trigrams:
    """An empty table of about `rows` rows."""
    return CompiledTrigrams(rows) if library() is not None else PythonTrigrams(rows)
