"""Arguments of the compiled code are checked before use: invalid fields of a pass are refused."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from models import RECURRENT, SHARING, tiny
from test_seq2seq import tiny as seq2seq
from truedraft import DraftTree
from truedraft.runtime import native
from truedraft.runtime.native import Failure, Form, Op, OpKind, PassArguments
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.recurrent import RecurrentTarget
from truedraft.targets.seq2seq import Seq2SeqTarget
from truedraft.views._base import View
from truedraft.views.ffn_skipllm import FfnSkipLlm

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
WRONG = (-1, -(2**40), 2**20, 2**40, 2**62)
PER_NODE = ("token", "slot", "position", "place", "base")
READ = {  # fields that a kind of operation uses, and whose invalid values C can detect
    OpKind.EMBED: ("dst", "inner"),
    OpKind.RMS_NORM: ("src", "dst", "inner"),
    OpKind.LAYER_NORM: ("src", "dst", "inner"),
    OpKind.LINEAR: ("src", "dst", "inner", "out", "form"),
    OpKind.GATED: ("src", "dst", "inner", "out", "form"),
    OpKind.ACTIVATE: ("src", "dst", "inner"),
    OpKind.PREPARE: ("src", "other", "dst", "heads", "kv_heads", "head", "rotary", "step", "k_at", "v_at"),
    OpKind.ATTEND: ("src", "dst", "heads", "kv_heads", "head", "step", "inner"),
    OpKind.HEADS: ("src", "dst", "heads", "step", "kv_step", "k_at", "v_at", "inner", "out", "form"),
    OpKind.LATENT: ("src", "other", "dst", "heads", "head", "inner", "step", "kv_step", "k_at", "rotary"),
    OpKind.ADD: ("src", "other", "dst", "inner"),
    OpKind.SCALE: ("src", "other", "dst", "inner"),
    OpKind.CAP: ("src", "dst", "inner"),
    OpKind.GATHER: ("src", "dst", "inner"),
    OpKind.ROUTE: ("src", "dst", "experts", "top", "heads", "kv_heads", "window"),
    OpKind.PLAN: ("top",),
    OpKind.DEAL: ("src", "other", "dst", "inner", "top"),
    OpKind.COMBINE: ("src", "other", "dst", "inner", "top"),
    OpKind.CLAMP: ("src", "dst", "inner"),
    OpKind.COLUMNS: ("src", "dst", "inner", "out", "form"),
    OpKind.GLU: ("src", "dst", "inner"),
    OpKind.XIELU: ("src", "dst", "inner"),
    OpKind.CROSS: ("src", "dst", "heads", "kv_heads", "head", "step"),
    OpKind.MULTIPLY: ("src", "other", "dst", "inner"),
    OpKind.GATE: ("src", "dst", "heads", "head", "k_at", "step"),
    OpKind.CONVOLVE: ("src", "dst", "inner", "head"),
    OpKind.RATES: ("src", "other", "dst", "heads"),
    OpKind.RECUR: ("src", "other", "dst", "heads", "kv_heads", "head", "step", "k_at", "v_at", "q_at"),
    OpKind.SCAN: ("src", "other", "dst", "inner", "heads", "head", "k_at", "q_at"),
    OpKind.UNIT: ("src", "other", "dst", "inner", "k_at", "v_at"),
    OpKind.GATED_NORM: ("src", "other", "dst", "heads", "head"),
    OpKind.PICK: ("src", "dst", "heads", "head", "step", "k_at", "v_at"),
    OpKind.MIX: ("src", "other", "dst", "heads", "kv_heads", "head"),
    OpKind.MATCH: ("src", "other", "dst", "inner"),
    OpKind.EXCEED: ("src", "dst", "inner"),
    OpKind.SPARE: ("src", "dst", "inner"),
}
KINDS = [
    "llama", "mixtral", "dots1", "deepseek_v3", "gpt_neox", "gemma2", "cohere", "olmo", "gpt2", "gpt_oss", "apertus",
    "llama4_text", "gemma3n_text", "bloom", "bart", "t5",
]  # fmt: skip


class Taken(Exception):
    """Raised with the arguments of a call of `truedraft_pass`."""


def arguments(kind: str, *under: View) -> tuple[Any, ...]:
    """The arguments of a pass over two trees, of the whole model or under a view."""
    layers = 2 if kind in SHARING else None  # whose keys are their own: an operation without keys has unused fields
    model: Any = seq2seq(kind) if kind in ("bart", "t5") else tiny(kind, torch.float32, layers=layers)
    decoder = RecurrentTarget if kind in RECURRENT else DecoderTarget
    target = Seq2SeqTarget(model) if kind in ("bart", "t5") else decoder(model)
    target.reserve(2, 24)
    target.prefill([target.prompt(torch.tensor([5, 6, 7])), target.prompt(torch.tensor([8, 9]))])
    tree = DraftTree((7, 3, 4, 5, 6), (-1, 0, 0, 1, 2))
    return taken_from(target, [tree, DraftTree.chain(9, [4, 5])], *under)


def taken_from(target: Any, trees: list[DraftTree], *under: View) -> tuple[Any, ...]:
    """The arguments of the pass that scores trees, with what keeps the memory that they point at: the exception whose
    traceback holds the pass's frames, and the target."""
    runner: Any = target.runner
    own = runner._run

    def taken(*given: Any) -> int:
        runner._run = own
        raise Taken(*given)

    runner._run = taken
    with pytest.raises(Taken) as found:
        target.score(trees, *under)
    return (*found.value.args, (found, target))


def changed(given: PassArguments, **fields: Any) -> PassArguments:
    copied = PassArguments.from_buffer_copy(given)
    for name, value in fields.items():
        setattr(copied, name, value if isinstance(value, int) else ctypes.addressof(value))
    copied.memory = fields
    return copied


def array(values: list[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def read(given: PassArguments, name: str, count: int) -> list[int]:
    """The first entries of a list that a field points at."""
    return (ctypes.c_int64 * count).from_address(getattr(given, name))[:]


def with_entry(values: list[int]) -> Iterator[list[int]]:
    """Copies of a list, each with one invalid entry."""
    for at in range(len(values)):
        for wrong in WRONG:
            yield [*values[:at], wrong, *values[at + 1 :]]


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_fields_of_a_pass_are_refused(kind: str) -> None:
    ops, count, given, share, threads, _kept = arguments(kind)
    run: Any = native.library().truedraft_pass  # type: ignore[union-attr]
    assert run(ops, count, given, share, threads) == 0
    n = given.nodes
    sizes = dict.fromkeys(PER_NODE, n) | {"extra_from": n + 1, "extra": given.extras, "extra_position": given.extras}
    sizes |= {"gather": given.tail, "group_from": given.groups + 1} | (
        {"source_lengths": n, "source_slot": n} if given.sources else {}
    )
    lists = {name: read(given, name, size) for name, size in sizes.items()}
    for name, values in lists.items():
        for wrong in with_entry(values):
            assert run(ops, count, changed(given, **{name: array(wrong)}), share, threads), (name, wrong)
    for name in ("nodes", "tail", "capacity", "positions", "slots", "longest", "buffers", "groups"):
        for wrong in {"longest": (-1, 0, 1, 2**40), "tail": (-1, -(2**40))}.get(name, (-1, -(2**40), 0)):
            assert run(ops, count, changed(given, **{name: wrong}), share, threads), (name, wrong)
    for name, wrongs in (("stride", (-16, 0, 7)), ("room", (-1, -(2**40)))):
        values = read(given, name, given.buffers)
        for at in [i for i, value in enumerate(values) if value]:
            for wrong in wrongs:
                listed = array([*values[:at], wrong, *values[at + 1 :]])
                assert run(ops, count, changed(given, **{name: listed}), share, threads), (name, at, wrong)
    for wrong in (0, -1, 2**30):
        assert run(ops, count, given, share, wrong) == Failure.THREADS
    assert run(ops, count, given, 0, threads) == run(ops, 0, given, share, threads) == Failure.OP


SPARING = FfnSkipLlm("0-1", similarity=0.9)


@pytest.mark.parametrize(
    "kind", [*KINDS, "lfm3", "qwen3_next", "granitemoehybrid", "jamba", "recurrent_gemma", SPARING]
)
def test_invalid_fields_of_an_operation_are_refused(kind: Any) -> None:
    ops, count, given, share, threads, _kept = arguments("llama", kind) if kind is SPARING else arguments(kind)
    run: Any = native.library().truedraft_pass  # type: ignore[union-attr]
    for at in range(count):
        for name in READ[OpKind(ops[at].kind)]:
            narrow = dict(Op._fields_)[name] is ctypes.c_int32
            for wrong in (-1, -(2**31), 2**31 - 1) if narrow else WRONG:
                copied = (Op * count).from_buffer_copy(ops)
                setattr(copied[at], name, wrong)
                assert run(copied, count, given, share, threads) == Failure.OP, (OpKind(ops[at].kind).name, name, wrong)
        copied = (Op * count).from_buffer_copy(ops)
        copied[at].kind = 99
        assert run(copied, count, given, share, threads) == Failure.OP


def test_what_nodes_skip_is_given_with_the_operations_that_read_it() -> None:
    ops, count, given, share, threads, _kept = arguments("llama", SPARING)
    run: Any = native.library().truedraft_pass  # type: ignore[union-attr]
    assert any(op.spared for op in ops) and run(ops, count, given, share, threads) == 0
    assert run(ops, count, changed(given, sparing=0), share, threads) == Failure.OP
    for at in range(count):
        if ops[at].spared:
            ops[at].tail = 1
            assert run(ops, count, given, share, threads) == Failure.OP
            ops[at].tail = 0


def test_invalid_fields_of_a_linear_layer_are_refused() -> None:
    run: Any = native.library().truedraft_linear  # type: ignore[union-attr]
    weight, x, y = torch.randn(8, 32), torch.randn(3, 32), torch.zeros(3, 8)
    right = dict(kind=OpKind.LINEAR, dst=1, scale=1.0, weight=weight.data_ptr(), out=8, inner=32)

    def code(nodes: int = 3, threads: int = 1, **wrong: Any) -> int:
        return run(Op(**{**right, **wrong}), x.data_ptr(), nodes, y.data_ptr(), threads)

    assert code() == 0
    torch.testing.assert_close(y, x @ weight.T)
    assert code(nodes=-1) == code(nodes=0) == code(nodes=2**40) == Failure.NODES
    assert code(threads=0) == code(threads=-3) == Failure.THREADS
    for wrong in (
        {"out": 0}, {"out": -1}, {"out": 2**40}, {"inner": 0}, {"inner": 31}, {"inner": -16}, {"form": -1},
        {"form": len(Form)}, {"form": 2}, {"kind": OpKind.ATTEND}, {"kind": 99}, {"src": 1}, {"dst": 2}, {"tail": 1},
        {"experts": 2}, {"weight": None}, {"form": 3, "shift": 63}, {"form": 6}, {"form": 8, "shift": 7},
        {"form": 8, "shift": 4, "groups": 1}, {"form": 8, "shift": 52}, {"form": 4, "apart": 8}, {"spared": 1},
    ):  # fmt: skip
        assert code(**wrong) == Failure.OP, wrong
