"""The operations of a compiled pass whose linear layers have weights of fewer bits."""

from __future__ import annotations

from truedraft.runtime.native import Form, Op
from truedraft.runtime.panels import RoundedCopies
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable

FORMS = (Form.PANEL_INT8, Form.PANEL_INT4)  # of rounded weights


class RoundedOps:
    """Operations that read rounded copies of weights; all others are those of the whole program, with its cache.

    Routers of experts read their weights as they are.

    Args:
        program: of the weights as they are.
        rounded: the same, compiled from the copies.
        copies: these.

    Raises:
        NotCompilable: no weight has more bits than the copies, or the two programs are not made of the same steps.
    """

    def __init__(self, program: Program, rounded: Program, copies: RoundedCopies):
        if not len(copies):
            raise NotCompilable(f"its weights have {copies.bits} bits already")
        if list(map(_step, program.ops)) != list(map(_step, rounded.ops)):
            raise NotCompilable("its feed-forwards have gates in several formats")
        self.whole, self.rounded = program, rounded
        names = list(program.widths)
        router = names.index("router") if "router" in names else None
        self._changed = {
            i: op
            for i, (op, whole) in enumerate(zip(rounded.ops, program.ops, strict=True))
            if op.form in FORMS and op.form != whole.form and op.dst != router
        }

    @property
    def ops(self) -> list[Op]:
        """All operations, in the order of the whole program."""
        return [self._changed.get(i, op) for i, op in enumerate(self.whole.ops)]

    def refresh(self) -> None:
        """See `Program.refresh`."""
        self.rounded.refresh()


def _step(op: Op) -> tuple[int, ...]:
    return op.src, op.other, op.dst
