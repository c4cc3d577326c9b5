"""The compiled data structures: loading them, and their memory layouts as `ctypes` structures.

The library is built when truedraft is installed, where there is a C compiler; elsewhere the structures are in Python.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from truedraft.stores._cursor import Cursor, Place

CALLS = 4  # as in automaton.c
ON_TREES = ("counted", "grown", "union", "follow", "settled", "walk", "recycle", "highest", "alone", "ranked")


class AutomatonLayout(ctypes.Structure):
    """`Automaton` of automaton.c, field by field."""

    __slots__ = ()  # an unknown field is an error
    _fields_ = [
        *((name, c_int64) for name in ("tokens", "states", "edges", "tops", "hashed", "slots")),
        *((name, c_int64) for name in ("token_room", "state_room", "edge_room", "top_room")),
        *((name, c_void_p) for name in ("token", "state", "edge", "top", "slot")),
        *((name, c_int32) for name in ("cap", "tail", "active", "depth")),
    ]


class TrigramTable(ctypes.Structure):
    """`TrigramTable` of trigrams.c, field by field."""

    __slots__ = ()  # an unknown field is an error
    _fields_ = [("row", c_void_p), ("sets", c_int64), ("clock", c_int32)]


@cache
def library() -> ctypes.PyDLL | None:
    """The compiled structures, or None where they were not built; TRUEDRAFT_NATIVE=0 in the environment hides them.

    Calls hold the GIL, so threads may share a structure.
    """
    folder = Path(__file__).parent
    built = sorted([*folder.glob("_compiled*.so"), *folder.glob("_compiled*.pyd")])
    if not built or os.environ.get("TRUEDRAFT_NATIVE", "") == "0":
        return None
    try:
        lib = ctypes.PyDLL(str(built[-1]))
    except OSError:
        return None
    one, at, place, ints = POINTER(AutomatonLayout), POINTER(Cursor), POINTER(Place), c_void_p
    for name, result, arguments in (
        ("begin", c_int, [one, c_int32]),
        ("free", None, [one]),
        ("extend", c_int, [one, ints, c_int64]),
        ("read", c_int, [one, at, ints, c_int64]),
        ("follow", None, [one, at, ints, c_int64]),
        ("shorten", None, [one, at, c_int32]),
        ("copy", c_int64, [one, at, c_int32, c_int64, c_int64, c_int, ints]),
        ("first", c_int32, [one, at]),
        ("grow", c_int64, [one, at, c_int64, c_int32, c_int32, c_int32, ints, ints, ints]),
        ("best", c_int64, [one, at, c_int64, *[c_double] * 3, *[c_int32] * 2, POINTER(c_double), *[ints] * 4]),
        ("suffixes", c_int64, [one, at, c_int64, ints, ints]),
        ("locate", None, [one, at, place, c_int64, ints, *[c_int64] * 2, *[c_int32] * 3, *[c_int64] * 2, c_double]),
        ("sound", c_int, [one]),
        ("largest", None, [c_void_p, c_int64, c_int64, c_int64, ints]),
        ("likeliest", None, [c_void_p, c_int64, c_int64, c_int64, c_int32, ints]),
        ("chances", None, [c_void_p, c_int64, c_int64, c_int64, c_int32, ints, c_void_p]),
        ("rank", None, [c_void_p, c_int64, c_int64, ints, c_int64, c_int32, ints, c_void_p, c_void_p]),
        ("two_largest", None, [c_void_p, c_int64, c_int64, ints, c_int64, c_void_p]),
        ("succeed", None, [c_void_p, c_int64, c_int64, c_int64, c_int32, ints, ints, c_int64]),
        ("table", c_int, [POINTER(TrigramTable), c_int64]),
        ("table_copy", c_int, [POINTER(TrigramTable), POINTER(TrigramTable)]),
        ("table_free", None, [POINTER(TrigramTable)]),
        ("weigh", None, [POINTER(TrigramTable), ints, c_int64, c_float, c_float]),
        ("search", c_int64, [POINTER(TrigramTable), *[c_int32] * 4, c_double, c_double, c_int32, ints, ints, c_void_p]),
        ("store_layout", c_int64, []),
    ):
        if (function := getattr(lib, f"truedraft_{name}", None)) is None:
            return None  # built from other sources than these
        function.restype, function.argtypes = result, arguments
    layout = (CALLS * 4096 + ctypes.sizeof(AutomatonLayout)) * 4096 + ctypes.sizeof(Cursor)
    return lib if lib.truedraft_store_layout() == layout else None


@cache
def trees() -> Any:
    """The module of `_trees.c`, or None where it was not built; TRUEDRAFT_NATIVE=0 in the environment hides it."""
    return _module("_trees", ON_TREES)


@cache
def drafts() -> Any:
    """The same of `_drafts.c`, which reads the automata of `library`."""
    return None if library() is None else _module("_drafts", ("frequent",))


def _module(name: str, functions: Sequence[str]) -> Any:
    if os.environ.get("TRUEDRAFT_NATIVE", "") == "0":
        return None
    try:
        module = import_module(f"truedraft.stores.{name}")
    except ImportError:
        return None
    return module if all(hasattr(module, function) for function in functions) else None
