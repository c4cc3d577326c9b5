"""Streamers of `transformers`: fed with tokens while a call runs, and ended with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from truedraft.sampling import History
from truedraft.tree import Row

P = ParamSpec("P")
R = TypeVar("R")


class Stream:
    """Feeds a streamer as `generate` does: one token per row and step, once every row has reached the step."""

    def __init__(self, streamer: Any, rows: Sequence[Row], history: History):
        self.streamer, self.rows, self.history, self.sent = streamer, rows, history, 0

    def put(self) -> None:
        if self.streamer is None:
            return
        running = [row.step for row in self.rows if not row.ended]
        reached = min(running) if running else max(row.step for row in self.rows)
        for step in range(self.sent, reached):
            self.streamer.put(self.history.column(step).cpu())
        self.sent = reached


def ending_streamer(generate: Callable[P, R]) -> Callable[P, R]:
    """`generate`, with its `streamer` ended even after an error, so that a reader in another thread does not block."""

    @wraps(generate)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return generate(*args, **kwargs)
        finally:
            streamer: Any = kwargs.get("streamer")
            if streamer is not None:
                streamer.end()

    return wrapper
