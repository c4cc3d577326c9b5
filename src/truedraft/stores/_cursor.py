"""Types that the compiled and the Python automaton share: positions in it, trees grown from it, and limits."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64
from typing import NamedTuple

CAP = 128  # tokens of the longest string whose occurrences are counted
MOST = 256  # nodes of the largest tree grown
SEPARATOR = -1  # between documents; never drafted


class Cursor(ctypes.Structure):
    """A position in an automaton: the longest suffix of the tokens read that occurs in its text.

    length: tokens of that suffix. pending: of a text's own cursor, the last token, not yet added to the automaton.
    """

    __slots__ = ()  # an unknown field is an error
    _fields_ = [("state", c_int32), ("length", c_int32), ("pending", c_int32), ("has_pending", c_int32)]

    def copy(self) -> Cursor:
        return Cursor(self.state, self.length, self.pending, self.has_pending)


class Place(ctypes.Structure):
    """The position of a text in an input that it follows.

    at: index of the next token, -1 where there is none.
    run: consecutive tokens equal to the input. wrong: tokens since then that were not.
    """

    __slots__ = ()  # an unknown field is an error
    _fields_ = [("at", c_int64), ("run", c_int32), ("wrong", c_int32)]


class Search(NamedTuple):
    """Where a place in an input is looked for after a departure; see `input_guided.py`.

    shortest, afar: tokens of the shortest match where there is no place, and anywhere in the input while there is one.
    context: last tokens that are compared with the input.
    reach: tokens around the old place searched for a match. patience: wrong tokens after which the place is given up.
    replaced: score of one token replaced.
    """

    shortest: int
    afar: int
    context: int
    reach: int
    patience: int
    replaced: float


class Sizes(NamedTuple):
    """Bounds of the trees grown from a match, as SuffixDecoding has them (arXiv 2411.04975).

    nodes: most of any tree. alpha, offset: a match of n tokens grows at most `alpha * n + offset` nodes.
    rare: least share of the occurrences of the match that a node has.
    wide: children of a node, at most 8. deep: tokens of match and tree together.
    """

    nodes: int
    alpha: float
    offset: float
    rare: float
    wide: int
    deep: int


class Grown(NamedTuple):
    """A tree of continuations, most frequent first: tokens, the parent of each (-1 the root), occurrences of each."""

    tokens: list[int]
    parents: list[int]
    counts: list[int]


class Best(NamedTuple):
    """The tree with the most expected tokens, and the match that it is grown from: its tokens and its occurrences."""

    grown: Grown
    expected: float
    length: int
    occurrences: int
