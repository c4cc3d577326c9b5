"""Text input and output: files, a spinner, notes."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.errors import Note, Refused, why

if TYPE_CHECKING:
    from rich.console import Console

BOM = "\ufeff"  # a byte order mark, which some editors and shells put before a text


def read(path: Path, option: str) -> str:
    """The text of a file given as `option`, without a byte order mark.

    Raises:
        Refused: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise Refused(f"{option} {path}: not UTF-8 text") from e
    except OSError as e:
        raise Refused(f"{option} {path}: {why(e)}") from e


def console(stderr: bool = False) -> Console:
    """Standard output or error, without markup; as wide as the terminal or COLUMNS, and 120 where there is neither."""
    from rich.console import Console

    width = shutil.get_terminal_size((120, 24)).columns
    return Console(width=width, markup=False, highlight=False, emoji=False, stderr=stderr)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str | None], None]]:
    """A spinner on stderr, if that is a terminal; yields a function that changes its text, or stops it for None."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    status = console.status(text)

    def update(text: str | None) -> None:
        if text is None:
            status.stop()
        else:
            status.update(text)

    with status:
        yield update


def reading(show: Callable[[str], None], text: str) -> Callable[[int, int], None]:
    """An `on_read` that shows how far it is."""
    return lambda read, total: show(f"{text}: {read:,} of {total:,} tokens")


@contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Within the block, every `Note` is a line on stderr, once; other warnings are shown as before."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", Note)
        others, shown = warnings.showwarning, set[str]()

        def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, Note):
                if str(message) not in shown:
                    print(f"note: {message}", file=sys.stderr)
                shown.add(str(message))
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield
