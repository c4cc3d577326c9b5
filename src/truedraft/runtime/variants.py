"""Lists of operations for passes that leave out a part of the model, or copy hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.caches.rows import RowCache
from truedraft.errors import Refused
from truedraft.runtime.experts import fewer_in
from truedraft.runtime.halves import Halves
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.rounded_entries import RoundedEntries
from truedraft.runtime.selecting import over
from truedraft.runtime.sparse_ops import Compiled, SparseOps
from truedraft.runtime.tapping import layer_number
from truedraft.views._base import Reduction
from truedraft.views._neurons import Neurons


class Variants:
    """The lists of operations of one program.

    Args:
        compiled: makes the same program of copies of weights, or of None of them where they are.
        name: of the model, for messages.
    """

    def __init__(self, program: Program, compiled: Compiled, name: str):
        self.program, self._compiled, self._name = program, compiled, name
        self._halves: dict[int, Halves] = {}
        self._sparse: dict[Neurons, SparseOps] = {}

    def check(self, reduction: Reduction) -> None:
        """Raises Refused where the program cannot leave this out; see `Halves` and `SparseOps`."""
        self._left_out(reduction)
        self._spared(reduction)
        if (neurons := reduction.neurons) is not None and neurons not in self._sparse:
            self._sparse[neurons] = SparseOps(self.program, self._compiled, neurons, self._name)

    def widths(self, reduction: Reduction) -> tuple[int, ...]:
        """Of the buffers that the choice of neurons needs, behind all others of a pass."""
        return () if reduction.neurons is None else self._sparse[reduction.neurons].widths

    def refresh(self) -> None:
        """See `Program.refresh`."""
        for sparse in self._sparse.values():
            sparse.refresh()

    def ops(
        self, given: Sequence[Op], hidden: Sequence[int], reduction: Reduction, part: RowCache | RoundedEntries | None
    ) -> list[Op]:
        """The operations under a reduction.

        Behind the program's buffers they use one for each of `hidden`, and one more where nodes skip feed-forwards, or
        those in `widths`.

        Args:
            given: of the whole program, with the weights that are read.
            hidden: layers whose hidden states are copied, numbered as in `Taps`.
            part: the entries that attention reads; None for all of the cache.
        """
        p, skipped, spared = self.program, self._left_out(reduction), self._spared(reduction)
        numbers = [layer_number(layer, len(p.outputs) - 1) for layer in hidden]
        first, last = {min(ops) for ops in spared}, {max(ops) for ops in spared}
        within, before = set().union(*spared), len(p.widths) + len(hidden)
        sparse = None if reduction.neurons is None else self._sparse[reduction.neurons]
        ops: list[Op] = []
        for i, op in enumerate(given):
            if sparse is not None:
                ops += sparse.entering(i, before, reduction.feed_forward)
                op = sparse.over(i, op, before)
            if ops and (i in skipped or i in first):  # what would have waited is gone, or behind another operation
                ops[-1] = _with(ops[-1], wait=1)
            if i in first:
                ops.append(_with(p.copying("x", before), spared=1))
            if i not in skipped:
                op = op if reduction.experts is None else fewer_in(op, reduction.experts)
                op = op if part is None or p.layers[i] < 0 else over(op, p.layers[i], part)
                ops.append(_with(op, spared=1) if i in within else op)
            if i in last:
                ops[-1].wait = 1
                ops.append(self._spare(reduction, before))
            ops += [p.copying("x", len(p.widths) + k) for k, n in enumerate(numbers) if n >= 0 and p.outputs[n] == i]
        for k, number in enumerate(numbers):
            if number == -1:  # after the final norm, for all nodes
                norm = Op.from_buffer_copy(p.ops[p.head_from + 1])
                norm.tail, norm.src, norm.dst = 0, list(p.widths).index("x"), len(p.widths) + k
                ops.append(norm)
        return ops

    def _spare(self, reduction: Reduction, before: int) -> Op:
        """The operation behind a feed-forward; before: the buffer with the hidden states before it."""
        assert reduction.sparing is not None
        x = list(self.program.widths).index("x")
        return Op(
            kind=OpKind.SPARE, wait=1, src=before, dst=x, inner=self.program.widths["x"], spared=1,
            scale=reduction.sparing.similarity,
        )  # fmt: skip

    def _left_out(self, reduction: Reduction) -> set[int]:
        """The operations that a reduction leaves out."""
        skipped = {i for layer in reduction.layers for i in self.program.ops_of(layer)}
        for layer in reduction.halves:
            half = "attention" if layer in reduction.attention else "feed_forward"
            skipped |= self._of(layer).without(half)  # type: ignore[arg-type]
        return skipped

    def _spared(self, reduction: Reduction) -> list[set[int]]:
        """The operations of each feed-forward that nodes may skip.

        Raises:
            Refused: something else is done to the hidden state meanwhile.
        """
        x, found = list(self.program.widths).index("x"), []
        for layer in reduction.spared:
            ops = self._of(layer).without("feed_forward")
            changing = {i for i in range(min(ops), max(ops) + 1) if self.program.ops[i].dst == x}
            if not changing <= ops or max(ops) not in changing:
                raise Refused(
                    f"the feed-forward of layer {layer} of {self._name} cannot be skipped by node: attention is added "
                    "to the hidden state meanwhile"
                )
            found.append(ops)
        return found

    def _of(self, layer: int) -> Halves:
        if layer not in self._halves:
            self._halves[layer] = Halves(self.program, layer, self._name)
        return self._halves[layer]


def _with(op: Op, **fields: int) -> Op:
    """The same operation with other fields."""
    copied = Op.from_buffer_copy(op)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied
