"""Measuring what passes cost, a share of each call's work at a time, and keeping it for this model and machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from truedraft.errors import NoRoom
from truedraft.files import write_whole
from truedraft.runtime.curve import TYPICAL, WIDTHS, Curve, Knot
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree

CONTEXT = 16  # positions read before the timed passes
OPENING = 4.0  # plain passes that reading these, and a first pass that is not timed, take
SHARE = 0.03  # of the plain passes that a call may make, for measuring
ROUNDS = 25  # over all widths, at most
SECONDS = 1.5  # of measuring in all, after which no further round begins
ENOUGH = 3  # rounds before times are kept on disk
BANDWIDTH = 2e10  # bytes a second at which weights are taken to be read, before any pass was seen
VERSION = 3


class Calibration:
    """The times of one target's passes, taken in rounds over all widths; the least counts: other work only adds time.

    kept: the curve that an earlier process kept on disk; None where there is none.
    complete: whether nothing is left to measure.
    """

    def __init__(self, target: DecoderTarget):
        self._target = target
        limit = target.hard_limit or 2 * WIDTHS[-1]
        self._widths = tuple(w for w in WIDTHS if w <= max(limit // 2, 1))
        self._context = max(min(CONTEXT, limit - self._widths[-1]), 1)
        self._times: dict[int, float] = {}  # the least of each width
        self._taken = 0  # passes that were timed
        self._spent = 0.0  # seconds of measuring
        self._steps = 0  # tokens of calls for which nothing was measured yet
        self._path = _path(target)
        self.kept = stored(self._path, self._widths)
        self.complete = self.kept is not None

    def guess(self) -> Curve:
        """What to expect before the first pass: that it takes as long as reading the weights."""
        size = sum(weight.numel() * weight.element_size() for weight in self._target.model.parameters())
        return Curve.typical(1, size / BANDWIDTH)

    def go_on(self, steps: int, curve: Curve | None) -> Curve | None:
        """Measure for a share of the time that plain decoding of `steps` tokens takes, and of those of the calls before
        for which nothing was measured yet: they may all be short.

        curve: what is known already; None where nothing is. Returned with the times of this turn, if there are any.
        """
        taken, held, begun = self._taken, self._target.cache, time.perf_counter()
        self._steps += steps
        if self.complete or OPENING + self._expected(self._next) > SHARE * self._steps:
            return curve
        due, self._steps = self._steps, 0
        try:
            for width, seconds in self._timed(begun, due):
                self._times[width] = min(seconds, self._times.get(width, math.inf))
                self._taken += 1
        except NoRoom:  # a scratch cache beside that of the call
            return curve
        finally:
            self._target.cache = held
            self._spent += time.perf_counter() - begun
        rounds = self._taken // len(self._widths)
        if rounds >= ROUNDS or (self._spent > SECONDS and rounds >= ENOUGH):
            self._keep()
        return self._measured(curve or Curve.typical(1, self._times[1])) if self._taken > taken else curve

    @property
    def _next(self) -> int:
        """The width whose turn it is."""
        return self._widths[self._taken % len(self._widths)]

    def _expected(self, width: int) -> float:
        """Plain passes that one of a width takes."""
        return self._times[width] / self._times[1] if width in self._times else TYPICAL[WIDTHS.index(width)]

    def _measured(self, curve: Curve) -> Curve:
        """A curve with the times measured so far in the place of what it says there."""
        times = self._times
        knots = {knot.width: knot for knot in curve.knots} | {w: Knot(w, s) for w, s in times.items()}
        bounds = min(curve.bounds[0], *times.values()), max(curve.bounds[1], *times.values())
        return Curve.of([knots[width] for width in sorted(knots)], bounds)

    def _timed(self, begun: float, steps: int) -> Iterator[tuple[int, float]]:
        """Widths and seconds of passes over a scratch cache, as long as the next is expected to end in time."""
        target = self._target
        target.reserve(1, self._context + self._widths[-1])
        ids = torch.arange(self._context, device=target.device) % target.vocabulary
        target.prefill([target.prompt(ids)])
        plain = min(self._pass(1), self._times.get(1, math.inf))
        while self._taken < ROUNDS * len(self._widths):
            width = self._next
            if time.perf_counter() - begun + self._expected(width) * plain > SHARE * steps * plain:
                return
            yield width, self._pass(width)

    def _pass(self, width: int) -> float:
        target, tree = self._target, DraftTree.chain(0, [i % self._target.vocabulary for i in range(width - 1)])
        while True:
            start = time.perf_counter()
            target.score([tree])
            target.wait()
            if not target.cold:  # sizes are captured when they first come up
                return time.perf_counter() - start

    def _keep(self) -> None:
        """On disk, for later processes; a folder that cannot be written costs them a measurement each."""
        self.complete = True
        times = Curve.of([Knot(w, self._times[w]) for w in self._widths], (0.0, math.inf)).seconds
        payload = {"widths": self._widths, "seconds": times, "model": type(self._target.model).__name__}
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, json.dumps(payload))


def of(target: DecoderTarget) -> Calibration:
    return Calibration(target)


def stored(path: Path | None, widths: tuple[int, ...]) -> Curve | None:
    """The curve over these widths that a file holds; None where there is none, or anything else stands there."""
    if path is None:
        return None
    try:
        payload = json.loads(path.read_text())
        seconds = tuple(payload["seconds"])
        sound = all(type(s) is float and 0 < s < math.inf for s in seconds) and sorted(seconds) == list(seconds)
        whole = payload["widths"] == list(widths) and len(seconds) == len(widths)
        return Curve(widths, seconds) if sound and whole else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _path(target: DecoderTarget) -> Path | None:
    """Where the curve of a target is kept; None where there is no home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "truedraft" / "curves" / f"{_key(target)}.json"


def _key(target: DecoderTarget) -> str:
    config = target.config
    machine = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else _processor()
    parts = [
        VERSION, type(target.model).__name__, config.to_json_string(use_diff=False), str(target.dtype),
        target.model.config._attn_implementation, target.runner.name, machine, torch.get_num_threads(),
        torch.__version__,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return f"{names[0]} x {os.cpu_count()}"
    except (OSError, IndexError):
        return f"{platform.processor()} {platform.machine()} x {os.cpu_count()}"
