"""The buffers of compiled passes: their sizes, and logits of rows of different numbers of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from truedraft.runtime.nodes import TOGETHER
from truedraft.runtime.program import Program
from truedraft.runtime.weights import padded_to_16


def buffer_rows(nodes: int, before: int) -> int:
    """Nodes that buffers are made for, where a pass needs `nodes` and those so far are for `before`."""
    return before if nodes <= before else max(nodes, 2 * before, TOGETHER)


def buffers_of(program: Program, nodes: int) -> dict[str, tuple[int, int]]:
    """The sizes of a program's buffers for so many nodes, by name: without parts of others, and without the logits,
    which are allocated per pass."""
    return {
        name: (nodes * program.rows[name], padded_to_16(width))
        for name, width in list(program.widths.items())[:-1]
        if name not in program.parts
    }


def pad_in_place(logits: Tensor, sizes: Sequence[int]) -> None:
    """Move the lines of rows that lie one behind another, as many as `sizes`, to where each row begins in (rows, width,
    V), and fill up with zeros."""
    lines, width, first = logits.flatten(0, 1), logits.shape[1], sum(sizes)
    for row, size in reversed([*enumerate(sizes)]):
        first -= size
        begin = row * width
        if begin != first:
            source = lines[first : first + size]
            lines[begin : begin + size] = source if begin >= first + size else source.clone()
        lines[begin + size : begin + width] = 0
