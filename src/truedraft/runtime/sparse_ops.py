"""The operations of a compiled pass that runs some of the neurons of feed-forwards, as each node's token needs them.

A predictor's operations come before those of its layer. Activations that a node does not choose are zero; weights that
no node of the pass chooses are not read: rows of the first linear layers, where the model keeps them, or by panels
(`panels.py`) where these are chosen whole, and of GPT-2, which keeps columns; and columns of the last one in panels, as
many as share a line of memory (one of fp32, two of bf16). A node's result does not depend on the other nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime.native import Form, Op, OpKind
from truedraft.runtime.program import ACTIVATIONS, Program
from truedraft.runtime.sparse import check_sizes, refused
from truedraft.runtime.weights import Copies, Weight, fields, padded
from truedraft.views._neurons import EPS, PANEL, Neurons

Compiled = Callable[[Copies | None], Program]
FIRST = (OpKind.GATED, OpKind.LINEAR)  # to the activations of neurons,
BETWEEN = (OpKind.ACTIVATE, OpKind.MULTIPLY)  # which these leave at zero


class SparseOps:
    """What a program runs where neurons are chosen.

    Args:
        compiled: makes the same program of copies of weights, or of None of them where they are.
        name: of the model, for messages.

    Attributes:
        widths: of the buffers that predictors need, behind all others of a pass: for their input, what lies between
            their layers, scores, and marks of what is chosen.

    Raises:
        Refused: a layer has experts or other operations around its neurons, or the predictors are not of its sizes.
    """

    def __init__(self, program: Program, compiled: Compiled, neurons: Neurons, name: str):
        self._program, self._neurons, self._kept = program, neurons, list[Tensor]()
        self._rows = program if neurons.predictors.size == PANEL else compiled(None)
        self._first: dict[int, int] = {}  # by layer, the operation whose results are the activations of neurons
        self._last: dict[int, int] = {}  # and the one that reads them
        sizes = [self._found(layer, name) for layer in range(len(program.layer_types))]
        check_sizes(neurons, program.widths["x"], sizes, name)
        predictors = neurons.predictors
        most = max(predictors.groups)
        self.widths = (predictors.hidden, predictors.rank, most, most)
        modules: list[Any] = list(predictors.layers)
        self._linears = [(self._read(first), self._read(second)) for first, _, second in modules]
        self._ones = padded(torch.ones(predictors.hidden))

    def _found(self, layer: int, name: str) -> int:
        """The number of a layer's neurons; notes its operations."""
        at = list(self._program.widths).index("g")
        ops = {i: self._program.ops[i] for i in self._program.ops_of(layer)}
        first = [i for i, op in ops.items() if op.dst == at and op.kind not in BETWEEN]
        last = [i for i, op in ops.items() if op.src == at and op.dst != at]
        plain = len(first) == len(last) == 1 and ops[first[0]].kind in FIRST and ops[last[0]].kind == OpKind.LINEAR
        if not plain or not self._program.tapped or any(op.experts for op in ops.values()):
            raise refused(name, f"layer {layer} has experts, or more than linear layers around its neurons")
        single = self._rows is not self._program
        if any(
            ops[i].offsets or ops[i].form == Form.PANEL_BLOCKS or (single and ops[i].scales) for i in (*first, *last)
        ):
            raise refused(name, f"its weights are integers: those without offsets can be, in groups of {PANEL}")
        (self._first[layer],), (self._last[layer],) = first, last
        return int(ops[last[0]].inner)

    def _read(self, linear: Any) -> dict[str, Any]:
        """The fields of an operation that refer to a predictor's layer."""
        kept, given = fields(Weight(linear.weight.detach(), None, linear.bias), padded)
        self._kept += kept
        return given

    def entering(self, at: int, buffer: int, whole: frozenset[int]) -> list[Op]:
        """The predictor of the layer that begins with the operation `at`; none where another does.

        buffer: the first of those in `widths`. whole: layers whose feed-forward does not run.
        """
        for layer in self._first:
            if self._program.ops_of(layer).start == at and layer not in whole:
                return self._predictor(layer, buffer)
        return []

    def _predictor(self, layer: int, buffer: int) -> list[Op]:
        (first, second), predictors, x = self._linears[layer], self._neurons.predictors, list(self._program.widths)
        given, inner, scores, marks = range(buffer, buffer + len(self.widths))
        every: dict[str, Any] = dict(wait=1, scale=1.0)
        relu = ACTIVATIONS["relu"]
        return [
            Op(
                kind=OpKind.RMS_NORM, src=x.index("x"), dst=given, inner=predictors.hidden, eps=EPS,
                weight=self._ones.data_ptr(), **every,
            ),
            Op(kind=OpKind.LINEAR, src=given, dst=inner, **first, **every),
            Op(kind=OpKind.ACTIVATE, src=inner, dst=inner, inner=predictors.rank, mode=relu, **every),
            Op(kind=OpKind.LINEAR, src=inner, dst=scores, **second, **every),
            Op(
                kind=OpKind.CHOOSE, src=scores, dst=marks, heads=predictors.groups[layer],
                kv_heads=self._neurons.count(layer), **every,
            ),
        ]  # fmt: skip

    def over(self, at: int, op: Op, buffer: int) -> Op:
        """An operation with the number `at` in the program, over what nodes choose."""
        for layer, groups in enumerate(self._neurons.predictors.groups):
            if at in (self._first[layer], self._last[layer]):
                outputs, single = at == self._first[layer], self._rows.ops[at]
                by_rows = outputs and self._rows is not self._program and single.kind in FIRST
                copied = Op.from_buffer_copy(single if by_rows else op)
                copied.other, copied.step = buffer + len(self.widths) - 1, self._neurons.predictors.size
                copied.kv_heads, copied.heads = (groups, 0) if outputs else (0, groups)
                return copied
        return op

    def refresh(self) -> None:
        """See `Program.refresh`."""
        self._rows.refresh()
