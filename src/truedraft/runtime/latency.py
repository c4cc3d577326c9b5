"""Latency profiles: the time of a pass by its width, measured within a share of each call's time, and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from truedraft.errors import NoRoom
from truedraft.files import write_whole
from truedraft.runtime.curve import TYPICAL, WIDTHS, Curve, Knot
from truedraft.tree import DraftTree, Prompt, Scores

OPENING = 2.0  # assumed cost of a measurement besides its passes, in plain passes
SHARE = 0.005  # of a call's plain passes, for measuring
ROUNDS = 4  # most rounds over all widths
SECONDS = 1.5  # of measuring in all, after which no further round begins
ENOUGH = 3  # least rounds, however long they take
DOUBTED = 2.0  # times the typical cost, to which the estimate from fewer than ENOUGH passes is limited
BANDWIDTH = 2e10  # assumed bytes per second of reading weights, before any pass was observed
VERSION = 6


class Timed(NamedTuple):
    """Timed passes of one width; seconds is their minimum, since other work only adds time."""

    seconds: float = math.inf
    passes: int = 0


class Timeable(Protocol):
    """The members of a target that timing uses; see `targets/_base.py`."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def hard_limit(self) -> int | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def cold(self) -> bool: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def cost_key(self) -> tuple[str, ...]: ...
    def temporary_cache(self, rows: int, capacity: int) -> AbstractContextManager[None]: ...
    def prompt(self, ids: Tensor) -> Prompt: ...
    def prefill(self, prompts: Sequence[Prompt]) -> Scores: ...
    def score(self, trees: Sequence[DraftTree]) -> Scores: ...
    def wait(self) -> None: ...


class LatencyProfile:
    """The times of one target's passes, measured in rounds over all widths.

    kept: the curve that earlier processes stored on disk; None where there is none.
    complete: whether nothing is left to measure, of the widths that the last call of `measure` may need.
    """

    def __init__(self, target: Timeable):
        self._target = target
        limit = target.hard_limit or 2 * WIDTHS[-1]
        self._widths = tuple(w for w in WIDTHS if w <= max(limit // 2, 1))
        self._needed = self._widths
        self._spent = 0.0  # seconds of measuring
        self._opening = OPENING
        self._keeping = 0.0  # seconds of storing the times on disk
        self._steps = 0  # tokens of calls since the last measurement
        self._path = _path(target)
        self._times = dict.fromkeys(self._widths, Timed()) | stored(self._path, self._widths)
        self.kept = self._measured(None)

    def initial(self) -> Curve:
        """An estimate before the first pass: the time to read the weights."""
        return Curve.typical(1, self._target.weight_bytes / BANDWIDTH)

    def measure(self, steps: int, curve: Curve | None, most: int) -> Curve | None:
        """Measure within a share of the time of plain decoding of `steps` tokens, and of the calls since the last
        measurement: single calls may be too short. A measurement begins once its passes may take as long as the rest
        of it: allocating a cache, reading its first token, and storing the times.

        curve: the current estimate, or None. Returned with this turn's measurements, if there are any.
        most: tokens of the widest pass of the call; wider ones than are needed for it are not measured.
        """
        measured, started = False, time.perf_counter()
        self._steps += steps
        self._needed = self._widths[: bisect_left(self._widths, most) + 1]
        share = SHARE * self._steps
        if share < 2 * self._opening or self._next(share - self._opening) is None:
            return curve
        due, self._steps = self._steps, 0
        try:
            with self._target.temporary_cache(1, 1 + self._needed[-1]):
                for width, seconds in self._timed(started, due):
                    least, passes = self._times[width]
                    self._times[width] = Timed(min(seconds, least), passes + 1)
                    measured = True
        except NoRoom:  # for a second cache beside the call's
            return curve
        finally:
            self._spent += time.perf_counter() - started
        if not measured:
            return curve
        before = time.perf_counter()
        self._keep()
        self._keeping = time.perf_counter() - before
        return self._measured(curve)

    @property
    def complete(self) -> bool:
        least = min(self._times[width].passes for width in self._needed)
        return least >= ROUNDS or (self._spent > SECONDS and least >= ENOUGH)

    def _next(self, room: float) -> int | None:
        """The width to measure next, of those that cost at most `room` plain passes; None where there is none."""
        most = 0 if self.complete else ROUNDS
        due = [w for w in self._needed if self._times[w].passes < most and self._expected(w) <= room]
        return min(due, key=lambda width: self._times[width].passes, default=None)

    def _expected(self, width: int) -> float:
        """Estimated cost of a pass of a width, in plain passes."""
        typical, (_, passes) = TYPICAL[WIDTHS.index(width)], self._times[width]
        if not passes or not self._times[1].passes:
            return typical
        found = self._least[width] / self._least[1]
        return found if passes >= ENOUGH else min(found, DOUBTED * typical)

    @property
    def _least(self) -> dict[int, float]:
        """Seconds of the timed widths, made non-decreasing: a pass is no slower than a wider one."""
        least, found = math.inf, {}
        for width, (seconds, passes) in reversed(self._times.items()):
            least = min(least, seconds)
            if passes:
                found[width] = least
        return found

    def _measured(self, curve: Curve | None) -> Curve | None:
        """`curve` with the measured times at their widths; `curve` itself where nothing was measured."""
        times = self._least
        if not times:
            return curve
        curve = curve or Curve.typical(*min(times.items()))
        knots = {knot.width: knot for knot in curve.knots} | {w: Knot(w, s) for w, s in times.items()}
        bounds = min(curve.bounds[0], *times.values()), max(curve.bounds[1], *times.values())
        return Curve.of([knots[width] for width in sorted(knots)], bounds)

    def _timed(self, started: float, steps: int) -> Iterator[tuple[int, float]]:
        """Widths and seconds of passes, as long as the next is expected to fit in the share."""
        target = self._target
        target.prefill([target.prompt(torch.zeros(1, dtype=torch.long, device=target.device))])
        target.wait()
        first = time.perf_counter() - started
        while True:
            plain = min(first, self._times[1].seconds)
            self._opening = (first + self._keeping) / plain
            width = self._next(SHARE * steps - (time.perf_counter() - started + self._keeping) / plain)
            if width is None:
                return
            yield width, self._pass(width)

    def _pass(self, width: int) -> float:
        target, tree = self._target, DraftTree.chain(0, [i % self._target.vocabulary for i in range(width - 1)])
        while True:
            start = time.perf_counter()
            target.score([tree])
            target.wait()
            if not target.cold:  # the first pass of a size is captured
                return time.perf_counter() - start

    def _keep(self) -> None:
        """Store the times on disk for later processes; a folder that cannot be written is ignored."""
        times = {width: timed for width, timed in self._times.items() if timed.passes}
        payload = {"times": times, "model": self._target.cost_key[0]}
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, json.dumps(payload))


def of(target: Timeable) -> LatencyProfile:
    return LatencyProfile(target)


def stored(path: Path | None, widths: tuple[int, ...]) -> dict[int, Timed]:
    """The timed passes in a file; empty where there is none, it is invalid, or has other widths."""
    if path is None:
        return {}
    try:
        read = json.loads(path.read_text())["times"].items()
        times = {int(width): Timed(*timed) for width, timed in read}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    sound = all(type(s) is float and 0 < s < math.inf and type(n) is int and n > 0 for s, n in times.values())
    return times if sound and times.keys() <= set(widths) else {}


def _path(target: Timeable) -> Path | None:
    """The file of a target's curve; None where there is no home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "truedraft" / "curves" / f"{_key(target)}.json"


def _key(target: Timeable) -> str:
    machine = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else _processor()
    parts = [VERSION, *target.cost_key, machine, torch.get_num_threads(), torch.__version__]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:24]


@cache
def _processor() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return f"{names[0]} x {os.cpu_count()}"
    except (OSError, IndexError):
        return f"{platform.processor()} {platform.machine()} x {os.cpu_count()}"
