"""Rows of one call that share too little memory to run at once: as many run as there is memory for.

They share the memory of a pool, as the requests of a server do (`reading.py`), and each is a request of its own, with
the parts of the call. A row that can grow no further gives its memory back, or that of the row that was admitted last,
which is read again later, with the same text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

from truedraft.caches.pool import Pool, units
from truedraft.control._base import Control
from truedraft.engine import Engine
from truedraft.errors import NoRoom
from truedraft.reading import PiecewiseEngine
from truedraft.request import Request
from truedraft.stats import Pass
from truedraft.targets._base import Target
from truedraft.targets.pooling import reserved

UTILIZATION = 0.95  # share of the memory that may be in use while rows run in turns; passes need some


class TurnsEngine(PiecewiseEngine):
    """An `Engine` for one request of several rows, whose cache was reserved by `targets.pooling.reserved`.

    Args:
        most: rows that run at once at most. limit: bytes that they may have in all.
    """

    def __init__(self, target: Target, control: Control, most: int, limit: int):
        super().__init__(target, control, inf, Pool(limit, target.position_bytes))
        self._most = most
        self._to_begin: deque[Request] = deque()
        self._held: list[Request] = []  # those that have begun and not ended
        self._call: Request | None = None

    @property
    def running(self) -> bool:
        return bool(self._to_begin) or super().running

    def admit(self, request: Request) -> None:
        """Add the request; its rows begin from the next step on."""
        self._call = request
        self._to_begin += (request.of_row(place) for place in range(len(request.rows)))

    def step(self) -> list[Request]:
        """As `PiecewiseEngine.step`; returns the request where rows of it took part in a pass, or it failed."""
        assert self._call is not None
        while self._to_begin and len(self._held) < self._most and self.grant(self._to_begin[0]):
            self._held.append(self._to_begin.popleft())
            super().admit(self._held[-1])
        advanced = super().step()
        if not advanced:
            return []
        self._record(self._call, advanced)
        for one in [one for one in self._held if one.rows[0].ended]:
            self._held.remove(one)
            self._pool.free(one)
        return [self._call]

    def close(self) -> None:
        self._to_begin.clear()
        super().close()

    def _record(self, call: Request, advanced: list[Request]) -> None:
        """Note the pass of some rows as one of the call."""
        made = [one.passes[-1] for one in advanced if one.passes and not one.error]
        emitted = tuple(emission for each in made for emission in each.emitted)
        call.passes.append(Pass(max((each.width for each in made), default=0), emitted))
        call.error = next((one.error for one in advanced if one.error), None)


class Room:
    """The memory of a call's rows: for all of them at once, or where that is too little, for rows in turns.

    Args:
        more: tells how many positions a pass writes behind the tokens of a row at most.
        ties: see `accelerate`.
    """

    def __init__(self, target: Target, more: Callable[[], int], ties: str):
        self._target, self._more = target, more
        self._in_turns = ties == "keep" and target.granularity is not None
        self._pool: tuple[int, int] | None = None  # rows at once, and bytes in all
        self._lack: NoRoom | None = None

    def reserve(self, rows: int, tokens: int) -> None:
        """Reserve a cache for rows of so many tokens.

        Raises:
            NoRoom: not even one of them fits, or they cannot run in turns.
        """
        length = tokens + self._more()
        try:
            self._target.reserve(rows, length)
        except NoRoom as error:
            if not self._in_turns or rows == 1:
                raise
            self._lack = error
            self._pool = self._shared(rows, tokens, length)

    def _shared(self, rows: int, tokens: int, length: int) -> tuple[int, int]:
        try:
            return reserved(self._target, rows, tokens, length, 0, None, UTILIZATION)
        except NoRoom:
            self._target.reserve(1, length)  # its sentence is that of a single row
            return 1, self._target.position_bytes * units(length)

    @property
    def notes(self) -> list[str]:
        """For a report."""
        if self._pool is None:
            return []
        return [f"{self._pool[1]:,} bytes of keys and values are too little for all rows at once: they ran in turns"]

    def engine(self, request: Request, control: Control) -> Engine:
        """The engine that runs the request.

        Raises:
            NoRoom: its rows would have to run in turns, and cannot: they advance together, or their noise is that of
                torch's own stream, which would be kept for all of them.
        """
        if self._pool is None:
            return Engine(self._target, control)
        assert self._lack is not None
        if request.stops.lockstep or (request.rule.samples and request.chance.kept_by_step):
            raise self._lack
        return TurnsEngine(self._target, control, *self._pool)
