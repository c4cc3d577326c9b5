"""Tables on a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from truedraft.layout import Table, fold, labelled

if TYPE_CHECKING:
    from rich.console import Console

NAMES = 20  # least width of the column of names, if they are that long
GAP = 2  # between columns


def print_table(out: Console, table: Table[Any]) -> None:
    """Print a table and its legend; columns that do not fit go to a further table, with the names repeated."""
    from rich.cells import cell_len

    heads = [column.head for column in table.filled]
    groups = {
        name: [[column.cell(entry) for column in table.filled] for entry in entries]
        for name, entries in table.groups.items()
    }
    columns = zip(heads, *(row for rows in groups.values() for row in rows), strict=True)
    widths = [max(map(cell_len, [*head.split(), *cells])) for head, *cells in columns]
    print_folded(out, table.title, "bold")
    out.print()
    for part in _parts(widths[1:], out.width - min(widths[0], NAMES)):
        names = max(min(widths[0], out.width - sum(widths[k] + GAP for k in part)), 1)
        drawn = [names, *(widths[k] for k in part)]
        _draw(out, [], drawn, [heads[0], *(heads[k] for k in part)])
        for group, rows in groups.items():
            if group:
                print_folded(out, group, "bold")
            _draw(out, [[row[0], *(row[k] for k in part)] for row in rows], drawn)
        out.print()
    if table.legend:
        out.print(labelled(table.legend, out.width), style="dim")
        out.print()


def print_folded(out: Console, text: str, style: str | None = None) -> None:
    """Print a line of text, folded to the width of the terminal."""
    out.print("\n".join(fold(text, out.width)), style=style)


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """The numbers of the columns after the names, split into parts that fit in `room`."""
    parts: list[list[int]] = [[]]
    taken = 0
    for number, width in enumerate(widths, 1):
        if parts[-1] and taken + GAP + width > room:
            parts.append([])
            taken = 0
        parts[-1].append(number)
        taken += GAP + width
    return parts


def _draw(out: Console, rows: Sequence[Sequence[str]], widths: Sequence[int], heads: Sequence[str] = ()) -> None:
    """Print rows in columns of these widths, the first for names, under headings if given."""
    from rich.box import SIMPLE_HEAD, Box
    from rich.table import Table as Drawn

    box = Box(str(SIMPLE_HEAD).replace("─", "-"), ascii=True) if out.options.ascii_only else SIMPLE_HEAD
    drawn = Drawn(box=box, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_header=bool(heads))
    for k, width in enumerate(widths):
        head = heads[k] if heads else ""
        drawn.add_column(head, justify="right" if k else "left", vertical="bottom", overflow="fold", width=width)
    for name, *figures in rows:
        drawn.add_row("\n".join(fold(name, widths[0])), *figures)
    out.print(drawn)
