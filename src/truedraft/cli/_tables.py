"""Tables on a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from truedraft.layout import Table, fold, labelled

if TYPE_CHECKING:
    from rich.console import Console

NAMES = 20  # columns of the terminal that the names of entries get at least, if they need them
GAP = 2  # between columns


def show(out: Console, table: Table[Any]) -> None:
    """A table, and below it what its columns mean; columns without room stand in a further table, names repeated."""
    from rich.cells import cell_len

    heads = [column.head for column in table.filled]
    rows: list[list[str]] = []  # cells, or the name of a group alone
    for group, entries in table.groups.items():
        rows += [[group]] if group else []
        rows += [[column.cell(entry) for column in table.filled] for entry in entries]
    cells = [[row[k] for row in rows if len(row) == len(heads)] for k in range(len(heads))]
    widths = [max(map(cell_len, [*head.split(), *texts])) for head, texts in zip(heads, cells, strict=True)]
    for i, part in enumerate(_parts(widths[1:], out.width - min(widths[0], NAMES))):
        shown = [[row[0], *(row[k] for k in part if len(row) > 1)] for row in [heads, *rows]]
        names = max(out.width - sum(widths[k] + GAP for k in part), 1)
        _draw(out, f"{table.title} (continued)" if i else table.title, shown, [names, *(widths[k] for k in part)])
        out.print()
    if table.legend:
        out.print(labelled(table.legend, out.width), style="dim")
        out.print()


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns behind the names, by number, in as many parts as the room for them makes needed."""
    parts: list[list[int]] = [[]]
    taken = 0
    for number, width in enumerate(widths, 1):
        if parts[-1] and taken + GAP + width > room:
            parts.append([])
            taken = 0
        parts[-1].append(number)
        taken += GAP + width
    return parts


def _draw(out: Console, title: str, rows: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    """A table of headings and rows; a row of one cell is the name of a group."""
    from rich.box import SIMPLE_HEAD, Box
    from rich.table import Table as Drawn

    box = Box(str(SIMPLE_HEAD).replace("─", "-"), ascii=True) if out.options.ascii_only else SIMPLE_HEAD
    drawn = Drawn(
        title=title, title_justify="left", title_style="bold", box=box, show_edge=False, pad_edge=False,
        padding=(0, GAP - 1, 0, 0),
    )  # fmt: skip
    heads, *rest = rows
    drawn.add_column(heads[0], overflow="fold", max_width=widths[0])
    for head, width in zip(heads[1:], widths[1:], strict=True):
        drawn.add_column(head, justify="right", overflow="fold", width=width)
    for name, *figures in rest:
        drawn.add_row("\n".join(fold(name, widths[0])), *figures, style=None if figures else "bold")
    out.print(drawn)
