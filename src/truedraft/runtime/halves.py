"""Which operations of a compiled layer its attention needs, and which its feed-forward: either half may be skipped.

A half is what is added to the hidden state in "x". Without it, the operations whose results nothing else reads are left
out too; a norm that both halves read stays with either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from truedraft.errors import Refused
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.program import Program

Half = Literal["attention", "feed_forward"]
PLAN = -1  # what ROUTE and PLAN leave for the operations of experts, which is in no buffer
ADDING = (OpKind.LINEAR, OpKind.COLUMNS, OpKind.MIX)  # with `mode`, to what is in `dst`
IN_PLACE = (OpKind.GATE, OpKind.PREPARE, OpKind.LATENT)
ROTATING = (OpKind.PREPARE, OpKind.LATENT)  # which change all of their buffers
IN_PARTS = (OpKind.HEADS, OpKind.PICK, OpKind.MIX)  # which may leave some of what `dst` holds


class Halves:
    """The operations of a layer that are left out with either half.

    Args:
        layer: of the program's layers.
        name: of the model, for messages.

    Raises:
        Refused: the halves are not added to the hidden state one by one.
    """

    def __init__(self, program: Program, layer: int, name: str):
        self._x = list(program.widths).index("x")
        self._split = {list(program.widths).index(n) for pair in program.parts.items() for n in (pair[0], pair[1][0])}
        self._ops = {i: program.ops[i] for i in program.ops_of(layer)}
        self._sources = self._read()
        halves: dict[Half, set[int]] = {"attention": set(), "feed_forward": set()}
        fixed: set[int] = set()
        for i, op in self._ops.items():
            if op.dst == self._x and op.kind != OpKind.PLAN:
                kinds = {self._ops[j].kind for j in self._needed([i])}
                if OpKind.CROSS in kinds or not self._adds(op):
                    fixed.add(i)
                else:
                    halves["attention" if OpKind.ATTEND in kinds else "feed_forward"].add(i)
        if self._x in self._split or not all(halves.values()):
            raise Refused(
                f"the halves of layer {layer} of {name} cannot be skipped: attention and feed-forward are not added to "
                "the hidden state one by one"
            )
        self._ends = {half: fixed | halves[other] for half, other in zip(halves, reversed(halves), strict=True)}

    def without(self, half: Half) -> set[int]:
        """The operations that are left out with a half."""
        return self._ops.keys() - self._needed(self._ends[half])

    def _read(self) -> dict[int, set[int]]:
        """By operation, those whose results it reads, except by the hidden state."""
        written: dict[int, set[int]] = defaultdict(set)
        sources: dict[int, set[int]] = {}
        for i, op in self._ops.items():
            sources[i] = set().union(*(written[buffer] for buffer in self._reads(op)))
            for buffer in self._writes(op):
                if buffer not in self._split and op.kind not in (*IN_PLACE, *IN_PARTS) and not self._keeps(op):
                    written[buffer] = set()
                written[buffer].add(i)
            written[self._x] = set()
        return sources

    def _reads(self, op: Op) -> Sequence[int]:
        read = [] if op.kind == OpKind.PLAN else [op.src, op.other]
        if op.kind in IN_PLACE or self._keeps(op):
            read.append(op.dst)
        return [*read, PLAN] if op.kind == OpKind.PLAN or op.top else read

    def _writes(self, op: Op) -> Sequence[int]:
        if op.kind == OpKind.PLAN:
            return [PLAN]
        if op.kind in ROTATING:
            return [op.src, op.other, op.dst]
        return [op.dst, PLAN] if op.kind == OpKind.ROUTE else [op.dst]

    @staticmethod
    def _keeps(op: Op) -> bool:
        """Whether its result is added to what `dst` holds."""
        return op.kind in ADDING and bool(op.mode)

    def _adds(self, op: Op) -> bool:
        """Whether it adds something to the hidden state."""
        return self._keeps(op) or (op.kind == OpKind.ADD and self._x in (op.src, op.other))

    def _needed(self, ends: Sequence[int] | set[int]) -> set[int]:
        """These operations and all that they depend on, within the layer."""
        found, left = set(ends), list(ends)
        while left:
            new = self._sources[left.pop()] - found
            found |= new
            left += new
        return found
