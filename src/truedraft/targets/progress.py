"""Progress of reading prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Reads(Protocol):
    """Reads prompts in calls, and reports the positions of each call."""

    on_read: Callable[[int], None] | None


@contextmanager
def reporting(readers: Sequence[Reads], report: Callable[[int, int], None] | None, total: int) -> Iterator[None]:
    """Within the block, calls of these over prompts of `total` tokens in all are reported, see `Target.on_read`."""
    done = 0

    def read(positions: int) -> None:
        nonlocal done
        done += positions
        report(done, total)  # type: ignore[misc]

    used = readers if report is not None else []
    try:
        for reader in used:
            reader.on_read = read
        yield
    finally:
        for reader in used:
            reader.on_read = None
