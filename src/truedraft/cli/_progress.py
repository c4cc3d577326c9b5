"""How far a longer command is, on standard error: a bar with the time left on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
from rich.text import Text

EVERY = 15.0  # seconds between two lines where there is no terminal; shorter commands print none

Show = Callable[[str, float], None]  # called with what runs next, and the share of the work that is done, 0 to 1


@contextmanager
def progressing(text: str) -> Iterator[Show]:
    """A bar with the time left on stderr, or lines where that is no terminal; yields a function that moves it on.

    text: what runs first.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    columns = (BarColumn(20), TaskProgressColumn(), Left(), TextColumn("{task.description}", markup=False))
    shared = sys.stdout is not None and sys.stdout.isatty()  # lines that are printed go above the bar
    with Progress(*columns, console=console, transient=True, redirect_stdout=shared) as bar:
        task, start = bar.add_task(text, total=None, end=None), time.monotonic()

        def show(text: str, share: float) -> None:
            left, now = seconds_left(time.monotonic() - start, share), time.monotonic()
            total, end = (None, None) if left is None else (1.0, now + left)
            bar.update(task, description=text, completed=min(share, 1.0), total=total, end=end)

        yield show


class Left(ProgressColumn):
    """The time that is left, counted down between two steps."""

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        return Text("" if end is None else f"{clock(max(end - time.monotonic(), 0.0))} left")


class Lines:
    """Progress where there is no terminal: a line on stderr every `EVERY` seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def __call__(self, text: str, share: float) -> None:
        now = time.monotonic()
        if now - self._last < EVERY or sys.stderr is None:
            return
        self._last, left = now, seconds_left(now - self._start, share)
        shown = "" if left is None else f", {clock(left)} left"
        print(f"{share:.0%} done{shown}: {text}", file=sys.stderr, flush=True)


def seconds_left(passed: float, share: float) -> float | None:
    """The seconds that are left after so many and this share of the work; None where it has only begun."""
    return max(passed * (1 - share) / share, 0.0) if share > 0 else None


def clock(seconds: float) -> str:
    """Seconds as 1:05, or 1:01:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
