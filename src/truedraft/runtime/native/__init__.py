"""The compiled pass: loads the library built from `pass.c`, and declares its structures.

The library is built when truedraft is installed, where there is a C compiler for x86-64 or arm64, on Linux or macOS;
elsewhere, and on x86-64 without AVX2, there is none, and the model's own forward is used.
"""

from __future__ import annotations

import ctypes
import enum
import os
from array import array
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, chain
from pathlib import Path

BEST = 8  # of `truedraft_choose`: all instructions that the processor has
STALE = "compiled passes were built from other sources than these: install truedraft again"


class OpKind(enum.IntEnum):
    """Operations, in the order of `enum Kind` in pass.c."""

    EMBED = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    LINEAR = 3
    GATED = 4
    ACTIVATE = 5
    PREPARE = 6
    ATTEND = 7
    ADD = 8
    SCALE = 9
    CAP = 10
    GATHER = 11
    ROUTE = 12
    PLAN = 13
    DEAL = 14
    COMBINE = 15
    CROSS = 16
    CLAMP = 17
    COLUMNS = 18
    GLU = 19
    XIELU = 20
    MULTIPLY = 21
    GATE = 22
    CONVOLVE = 23
    RATES = 24
    RECUR = 25
    GATED_NORM = 26
    PICK = 27
    HEADS = 28
    LATENT = 29
    SCAN = 30
    UNIT = 31
    MIX = 32
    MATCH = 33
    EXCEED = 34
    SPARE = 35
    CHOOSE = 36


class Failure(enum.IntEnum):
    """Errors of `truedraft_pass`, which then did nothing, in the order of its results in pass.c."""

    NO_MEMORY = 1
    TOKEN = 2
    PLACE = 3
    NODES = 4
    OP = 5
    THREADS = 6

    @property
    def why(self) -> str:
        return {
            Failure.NO_MEMORY: "no memory",
            Failure.TOKEN: "a token outside the vocabulary",
            Failure.PLACE: "a position outside the cache",
            Failure.NODES: "nodes that refer to slots, places or nodes that do not exist",
            Failure.OP: "an operation outside its buffers",
            Failure.THREADS: "more threads than supported",
        }[self]


class Form(enum.IntEnum):
    """Formats of weights, in the order of `enum Form` in pass.c."""

    FLOAT = 0
    BF16 = 1
    INT8 = 2
    GROUPED = 3
    PANEL_FLOAT = 4
    PANEL_BF16 = 5
    PANEL_INT8 = 6
    PANEL_INT4 = 7
    PANEL_BLOCKS = 8


class Op(ctypes.Structure):
    """`Op` of pass.c, field by field."""

    __slots__ = ()  # an unknown field is an error
    _fields_ = [
        *((name, c_int32) for name in ("kind", "wait", "src", "other", "dst", "narrow", "tail", "mode")),
        *((name, c_int64) for name in ("out", "inner", "heads", "kv_heads", "head", "rotary", "window", "step")),
        *((name, c_int64) for name in ("kv_step", "k_at", "v_at", "q_at", "experts", "top", "apart", "blank")),
        ("groups", c_int64),
        *(
            (name, c_void_p)
            for name in (
                "weight",
                "second",
                "scales",
                "second_scales",
                "offsets",
                "second_offsets",
                "bias",
                "other_bias",
                "q_norm",
                "k_norm",
                "sinks",
            )
        ),
        *((name, c_void_p) for name in ("keys", "values", "cosine", "sine", "factor")),
        *((name, c_float) for name in ("eps", "scale", "cap")),
        *((name, c_int32) for name in ("norm_once", "form", "shift", "interleaved", "norm_last", "bias_last")),
        *((name, c_int32) for name in ("half", "spared")),
    ]


class PassArguments(ctypes.Structure):
    """`Pass` of pass.c, field by field."""

    __slots__ = ("memory",)  # of the lists; an unknown field is an error
    _fields_ = [
        *((name, c_int64) for name in ("nodes", "tail", "vocabulary", "capacity", "positions")),
        *((name, c_int64) for name in ("sources", "source_slots")),
        *(
            (name, c_void_p)
            for name in (
                "token",
                "embeds",
                "slot",
                "position",
                "place",
                "base",
                "extra_from",
                "extra",
                "extra_position",
                "source_lengths",
                "source_slot",
                "gather",
                "rounded",
            )
        ),
        ("groups", c_int64),
        ("group_from", c_void_p),
        *((name, c_int64) for name in ("longest", "slots", "extras", "rows")),
        *((name, c_void_p) for name in ("row_from", "parent", "settled", "path_from", "path")),
        *((name, c_int64) for name in ("drafted", "buffers")),
        *((name, c_void_p) for name in ("room", "buffer", "stride", "sparing", "plan")),
        ("reach", c_int64),
    ]

    @classmethod
    def of(cls, numbers: Mapping[str, int], lists: Mapping[str, Sequence[int]]) -> PassArguments:
        """The arguments with these fields; the lists, of 64-bit integers, are copied into one block of memory."""
        memory = array("q", [*chain.from_iterable(lists.values())])
        ends = accumulate(map(len, lists.values()), initial=0)
        first = memory.buffer_info()[0]
        given = cls(**numbers, **{name: first + 8 * at for name, at in zip(lists, ends, strict=False)})
        given.memory = memory
        return given


class ChainArguments(ctypes.Structure):
    """`Chains` of chains.inc, field by field."""

    __slots__ = ()  # an unknown field is an error
    _fields_ = [
        *((name, c_int64) for name in ("chains", "logits", "columns", "room")),
        *((name, c_void_p) for name in ("column", "most", "end_from", "ends")),
        ("least", c_double),
        *((name, c_void_p) for name in ("tokens", "drafted")),
    ]


class TreeArguments(ctypes.Structure):
    """`Trees` of trees.inc, field by field."""

    __slots__ = ()  # an unknown field is an error
    _fields_ = [
        *((name, c_int64) for name in ("trees", "logits", "columns", "room")),
        *((name, c_void_p) for name in ("column", "most", "deepest", "budget", "end_from", "ends")),
        *((name, c_void_p) for name in ("shape_from", "shape")),
        *((name, c_int64) for name in ("children", "beam", "kept", "width", "levels", "limits")),
        *((name, c_void_p) for name in ("below", "limit")),
        *((name, c_int64) for name in ("nodes", "more", "places")),
        *((name, c_double) for name in ("decay", "plain", "node", "level", "gain", "threshold")),
        *((name, c_void_p) for name in ("rank", "token", "parent", "score", "read", "order")),
        *((name, c_void_p) for name in ("size", "reads", "orders", "passes", "seconds")),
        ("made", c_int64),
    ]


class NoLibrary(Exception):
    """Compiled passes are not available; with the reason."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled pass, or None where it was not built or this processor cannot run it (see `missing`).

    TRUEDRAFT_NATIVE=0 in the environment disables it.
    """
    try:
        return _loaded()
    except NoLibrary:
        return None


def takes_blocks() -> bool:
    """Whether there are compiled products of panels that have their scales within them."""
    lib = library()
    return lib is not None and bool(lib.truedraft_takes_blocks())


def attends_alone() -> int:
    """The bits of a mode that attention as torch computes it for single tokens takes; 0 where there is none."""
    lib = library()
    return 0 if lib is None else int(lib.truedraft_attends_alone())


def missing() -> str:
    """Why there is no library; empty where there is one."""
    try:
        _loaded()
    except NoLibrary as why:
        return str(why)
    return ""


def _loaded() -> ctypes.CDLL:
    if os.environ.get("TRUEDRAFT_NATIVE", "") == "0":
        raise NoLibrary("TRUEDRAFT_NATIVE=0 disables compiled passes")
    built = sorted(Path(__file__).parent.glob("_pass*.so"))
    if not built:
        raise NoLibrary(
            "compiled passes were not built at installation, for which a C compiler for x86-64 or arm64 is needed"
        )
    try:
        _share_threads()
        lib = ctypes.CDLL(str(built[-1]))
    except OSError as error:
        raise NoLibrary(f"compiled passes cannot be loaded: {error}") from error
    layout = 0
    behind = ctypes.sizeof(ChainArguments) + ctypes.sizeof(TreeArguments)
    for size in (Op.weight.offset, Op.eps.offset, ctypes.sizeof(Op), ctypes.sizeof(PassArguments), behind):
        layout = layout * 4096 + size
    of_pass = [POINTER(Op), c_int64, POINTER(PassArguments), c_int64, c_int32]
    for name, result, arguments in (
        ("pass", c_int32, of_pass),
        ("chains", c_int32, [*of_pass, POINTER(ChainArguments)]),
        ("trees", c_int32, [*of_pass, POINTER(TreeArguments)]),
        ("linear", c_int32, [POINTER(Op), c_void_p, c_int64, c_void_p, c_int32]),
        ("panels", c_int32, [c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32]),
        ("rows", c_int32, [c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32]),
        ("pack_blocks", c_int32, [c_int64, c_void_p, c_int64, c_int64, c_void_p]),
        ("multiply", c_int64, [c_int32, c_int64, c_int32]),
        ("choose", c_int32, [c_int32]),
        ("layout", c_int64, []),
        ("takes_blocks", c_int32, []),
        ("attends_alone", c_int32, []),
    ):
        if (function := getattr(lib, f"truedraft_{name}", None)) is None:
            raise NoLibrary(STALE)
        function.restype, function.argtypes = result, arguments
    if lib.truedraft_layout() != layout:
        raise NoLibrary(STALE)
    if not lib.truedraft_choose(BEST):
        raise NoLibrary("compiled passes need AVX2, which this processor does not have")
    return lib


def _share_threads() -> None:
    """Load torch's OpenMP for the library too: two thread pools would compete for the cores."""
    torch = find_spec("torch")
    for folder in torch.submodule_search_locations or () if torch else ():
        for path in Path(folder, "lib").glob("libgomp*"):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
