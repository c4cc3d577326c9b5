"""A counted suffix automaton: every string of a text, where it occurs, and how often each token followed it.

Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985. Compiled (`automaton.c`) where a C
compiler was available when truedraft was installed, else in Python (`_pure.py`), with one interface.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, addressof, byref, c_double, c_int32, c_void_p, cast
from functools import cache
from typing import Any, Protocol

import numpy as np

from truedraft.stores._cursor import CAP, MOST, Best, Cursor, Grown, Place, Search, Sizes
from truedraft.stores._native import AutomatonLayout, library
from truedraft.stores._pure import PythonAutomaton


class Automaton(Protocol):
    """The interface of both forms. Tokens are not negative, except SEPARATOR."""

    def __len__(self) -> int:
        """Tokens of the text."""

    @property
    def text(self) -> Sequence[int]:
        """All its tokens."""

    @property
    def nbytes(self) -> int:
        """Memory used, approximately, in bytes."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def read(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        """Append tokens, and move the text's own cursor: each token is looked up before it is added."""

    def follow(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        """Move a cursor along tokens, which need not occur in the text."""

    def shorten(self, cursor: Cursor, length: int) -> None:
        """Shorten a cursor's string to its last `length` tokens at most."""

    def copy(self, cursor: Cursor, shortest: int, count: int, enough: int = 1, latest: bool = False) -> list[int]:
        """The tokens after the longest suffix of the cursor's string that has `shortest` tokens or more.

        Those after its first or its latest occurrence: `enough` to `count` tokens, none beyond a separator; shorter
        suffixes are tried where there are fewer. The cursor is left at the suffix found.
        """

    def first(self, cursor: Cursor) -> int:
        """The index of the last token of the first occurrence of the cursor's string, which must not be empty."""

    def grow(self, cursor: Cursor, nodes: int, rarest: int = 1, wide: int = 8, deep: int = CAP) -> Grown:
        """The most frequent continuations of the cursor's string, best first.

        nodes: at most (and at most MOST). rarest: occurrences that a node needs. wide: children of a node, at most 8.
        """

    def best(self, cursor: Cursor, sizes: Sizes, score: float = 0.0) -> Best | None:
        """Of the trees grown from the cursor's string and its suffixes, the first with the most expected tokens.

        Expected tokens of a tree: the occurrences of its nodes over those of its suffix. The cursor is left at the
        suffix. None where there are no more than `score`.
        """

    def suffixes(self, cursor: Cursor) -> list[tuple[int, int]]:
        """Length and count of the cursor's string and its suffixes, longest first, one for each state."""

    def locate(
        self, cursor: Cursor, place: Place, source: int, tokens: Sequence[int], added: int, search: Search
    ) -> None:  # fmt: skip
        """Move a place in the first `source` tokens of the text along the latest tokens of a row.

        cursor: at all tokens of the row.
        tokens: the row's last ones, of which the last `added` are new; as many before them as `search` compares, if
            there are.
        """

    def arrays(self) -> dict[str, Any]:
        """The arrays that a file stores; see `loaded`."""


ARRAYS = {
    "token": ("tokens", 1),
    "state": ("states", 8),
    "edge": ("edges", 4),
    "top": ("tops", 9),
    "slot": ("slots", 1),
}


class CompiledAutomaton:
    """The compiled automaton.

    address: of its structure, for other compiled code.
    """

    def __init__(self, lib: ctypes.PyDLL, cap: int = CAP):
        self._lib, self._a = lib, AutomatonLayout()
        self.address = addressof(self._a)
        if not lib.truedraft_begin(byref(self._a), cap):
            raise MemoryError("no memory for a suffix automaton")

    def __del__(self) -> None:
        if "_a" in vars(self):  # else Ctrl-C interrupted its initialisation
            self._lib.truedraft_free(byref(self._a))

    def __len__(self) -> int:
        return self._a.tokens

    @property
    def text(self) -> Sequence[int]:
        return array("i", self.arrays()["token"].tobytes())

    @property
    def nbytes(self) -> int:
        a = self._a
        return 4 * (a.token_room + a.state_room * 8 + a.edge_room * 4 + a.top_room + a.slots)

    def extend(self, tokens: Sequence[int]) -> None:
        given = _ints(tokens)
        self._check(self._lib.truedraft_extend(byref(self._a), given.buffer_info()[0], len(given)))

    def read(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        given = _ints(tokens)
        self._check(self._lib.truedraft_read(byref(self._a), byref(cursor), given.buffer_info()[0], len(given)))

    def _check(self, done: int) -> None:
        if not done:
            raise MemoryError(f"no memory for a suffix automaton of more than {len(self)} tokens")

    def follow(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        given = _ints(tokens)
        self._lib.truedraft_follow(byref(self._a), byref(cursor), given.buffer_info()[0], len(given))

    def shorten(self, cursor: Cursor, length: int) -> None:
        self._lib.truedraft_shorten(byref(self._a), byref(cursor), length)

    def copy(self, cursor: Cursor, shortest: int, count: int, enough: int = 1, latest: bool = False) -> list[int]:
        count = max(min(count, len(self) + 1), 0)
        out = (c_int32 * count)()
        n = self._lib.truedraft_copy(byref(self._a), byref(cursor), shortest, count, enough, latest, out)
        return out[:n]

    def first(self, cursor: Cursor) -> int:
        return self._lib.truedraft_first(byref(self._a), byref(cursor))

    def grow(self, cursor: Cursor, nodes: int, rarest: int = 1, wide: int = 8, deep: int = CAP) -> Grown:
        nodes = max(min(nodes, MOST), 0)
        room = c_int32 * nodes
        tokens, parents, counts = room(), room(), room()
        n = self._lib.truedraft_grow(
            byref(self._a), byref(cursor), nodes, max(rarest, 1), wide, deep, tokens, parents, counts
        )
        return Grown(tokens[:n], parents[:n], counts[:n])

    def best(self, cursor: Cursor, sizes: Sizes, score: float = 0.0) -> Best | None:
        most = max(min(sizes.nodes, MOST), 0)
        room, expected, count = (c_int32 * (3 * most))(), c_double(score), c_int32()
        first, size = addressof(room), 4 * most
        n = self._lib.truedraft_best(
            byref(self._a), byref(cursor), most, sizes.alpha, sizes.offset, sizes.rare, sizes.wide, sizes.deep,
            byref(expected), addressof(count), first, first + size, first + 2 * size,
        )  # fmt: skip
        if n < 0:
            return None
        grown = Grown(room[:n], room[most : most + n], room[2 * most : 2 * most + n])
        return Best(grown, expected.value, cursor.length, count.value)

    def suffixes(self, cursor: Cursor) -> list[tuple[int, int]]:
        lengths, counts = (c_int32 * CAP)(), (c_int32 * CAP)()
        n = self._lib.truedraft_suffixes(byref(self._a), byref(cursor), CAP, lengths, counts)
        return list(zip(lengths[:n], counts[:n], strict=True))

    def locate(
        self, cursor: Cursor, place: Place, source: int, tokens: Sequence[int], added: int, search: Search
    ) -> None:  # fmt: skip
        given = _ints(tokens)
        self._lib.truedraft_locate(
            byref(self._a), byref(cursor), byref(place), source, given.buffer_info()[0], len(given), added, *search
        )

    def arrays(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, (count, width) in ARRAYS.items():
            n = getattr(self._a, count) * width
            where = getattr(self._a, name)
            whole = np.ctypeslib.as_array(ctypes.cast(where, POINTER(c_int32)), (n,)) if n else np.zeros(0, np.int32)
            found[name] = whole
        return found


class MappedAutomaton(CompiledAutomaton):
    """A compiled automaton over mapped arrays, which are not copied; it cannot grow.

    Raises:
        ValueError: the arrays are no automaton. Arrays that pass this check can be read safely, whatever they contain.
    """

    def __init__(self, lib: ctypes.PyDLL, arrays: Mapping[str, Any]):
        self._lib, self._a, self._arrays = (
            lib,
            AutomatonLayout(),
            dict(arrays),
        )  # room 0: the memory is not the library's
        self.address = addressof(self._a)
        for name, (count, width) in ARRAYS.items():
            if len(arrays[name]) % width or arrays[name].ctypes.data % arrays[name].itemsize:
                raise ValueError(f"{name!r} begins or ends within an entry")
            setattr(self._a, count, len(arrays[name]) // width)
            setattr(self._a, name, arrays[name].ctypes.data)
        if not lib.truedraft_sound(byref(self._a)):
            raise ValueError("its places do not fit together")

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def arrays(self) -> dict[str, Any]:
        return self._arrays

    def extend(self, tokens: Sequence[int]) -> None:
        raise TypeError("an automaton that was read from a file cannot grow")

    def read(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        self.extend(tokens)


def _ints(tokens: Sequence[int]) -> array[int]:
    return tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)


@cache
def best_tree() -> int:
    """The address of the compiled form of `Automaton.best`, for other compiled code."""
    return cast(library().truedraft_best, c_void_p).value or 0  # type: ignore[union-attr]


def automaton(cap: int = CAP) -> Automaton:
    """An empty automaton.

    cap: tokens of the longest string whose occurrences are counted; longer ones are found and copied too.
    """
    if (lib := library()) is not None:
        return CompiledAutomaton(lib, cap)
    return PythonAutomaton(cap)


def loaded(arrays: Mapping[str, Any]) -> Automaton:
    """An automaton from the result of `arrays`; where possible mapped: nothing is copied, and it cannot grow.

    Where only its text can be used (one of the two forms is the Python one) it is built from that.

    Raises:
        KeyError, ValueError: the arrays do not make an automaton.
    """
    if any(array.ndim != 1 or array.dtype != np.int32 for array in arrays.values()):
        raise ValueError("its arrays are of other kinds")
    lib = library()
    if lib is not None and "state" in arrays:
        return MappedAutomaton(lib, arrays)
    made = automaton()
    made.extend(arrays["token"].tolist())
    return made
