"""The time that the parts of a pass take, measured from outside the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from truedraft.drafters._base import Drafter
from truedraft.engine import Engine
from truedraft.stats import PassTimes
from truedraft.tree import DraftTree, Row

P = ParamSpec("P")
R = TypeVar("R")
Drafting = Callable[[Drafter, Sequence[Row], Sequence[int]], list[DraftTree]]

# What of an engine is timed, by the method, where it has it: the part of a pass that it is.
TIMED = {
    "_measure": "measure",
    "_read": "prefill", "_read_pieces": "prefill",
    "_score": "target", "_decide": "target",
    "_verified": "verify",
    "_commit": "commit",
    "_begin": "observe", "_observe": "observe",
    "_budget": "control", "_prune": "control", "_learn": "control",
}  # fmt: skip


class Stopwatch:
    """Seconds spent in the parts that were wrapped by `timed`, of parts within parts each moment in the innermost.

    times: by part. seconds: the same as a live mapping, with other parts that were wrapped.
    drafting: those of `times.draft`, by the `id` of the drafter.
    """

    def __init__(self) -> None:
        self.times = PassTimes()
        self.seconds: dict[str, float] = vars(self.times)
        self.drafting: dict[int, float] = {}
        self._within = 0.0  # seconds of the parts that have ended within the current one

    def timed(self, part: str, f: Callable[P, R]) -> Callable[P, R]:
        """`f`, its time counted under `part`, without that of other parts within it."""
        seconds = self.seconds
        seconds.setdefault(part, 0.0)

        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            around, self._within = self._within, 0.0
            start = time.perf_counter()
            try:
                return f(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                seconds[part] += spent - self._within
                self._within = around + spent

        return wrapped

    def timed_steps(self, f: Callable[P, R]) -> Callable[P, R]:
        """`f`, a step or what is done before the first one, its whole time counted under `all`."""
        times = self.times

        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            try:
                return f(*args, **kwargs)
            finally:
                times.all += time.perf_counter() - start

        return wrapped

    def timed_drafts(self, f: Drafting) -> Drafting:
        """Drafting, its time counted under `draft` and for the drafter; that of rows' first drafts also under
        `draft_prefill`."""
        times, drafting, draft = self.times, self.drafting, self.timed("draft", f)

        def wrapped(drafter: Drafter, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
            begins, before = any(row.step == 1 for row in rows), times.draft
            try:
                return draft(drafter, rows, budget)
            finally:
                spent = times.draft - before
                times.draft_prefill += spent * begins
                drafting[id(drafter)] = drafting.get(id(drafter), 0.0) + spent

        return wrapped

    def attach(self, engine: Engine) -> None:
        """Time the parts of an engine, for its control among others."""
        for method, part in TIMED.items():
            if (timed := getattr(engine, method, None)) is not None:
                setattr(engine, method, self.timed(part, timed))
        engine._draft = self.timed_drafts(engine._draft)
        engine.control.times, engine.control.drafting = self.times, self.drafting
