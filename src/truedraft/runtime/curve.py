"""Pass cost by width: an online estimate that stays within the observed times."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import pairwise
from operator import le
from typing import Any, NamedTuple

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
MEASURED = 8.0  # weight of a measured time, in passes
HICCUP = 4.0  # observed times are capped at this multiple of the expected: other work only adds time
FASTEST = 0.25  # largest step rate of a mean with few observations
FAINT = 1e-6  # least weight of a time, in passes
TYPICAL = (1.0, 1.1, 1.2, 1.4, 1.9, 3.0, 5.0)  # times at WIDTHS, in plain passes, of most models on most machines
KNOTS = 256  # of a curve, at most, in compiled code
CAUTIOUS = (1.0, 1.35, 1.8, 2.5, 3.8, 6.0, 9.0)  # those assumed before any was measured: of small weights in few bits


class Knot(NamedTuple):
    """The decayed mean time of passes at one width.

    seconds: the mean. passes: its weight, the decayed number of observations.
    """

    width: int
    seconds: float
    passes: float = MEASURED


@cache
def compiled() -> Any:
    """The module of `_curve.c`, or None where it was not built; TRUEDRAFT_NATIVE=0 in the environment hides it."""
    if os.environ.get("TRUEDRAFT_NATIVE", "") == "0":
        return None
    try:
        return import_module("truedraft.runtime._curve")
    except ImportError:
        return None


@dataclass(frozen=True)
class Curve:
    """Seconds of a pass by width, interpolated linearly between a few widths.

    Every knot holds a mean of observed times, which stays within their range in any order; the curve is the means made
    non-decreasing (isotonic regression, weighted by passes), so errors do not accumulate from pass to pass.

    widths: tokens in a pass, all rows together, ascending. seconds: positive, finite and non-decreasing.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    knots: tuple[Knot, ...] = field(default=(), repr=False, compare=False)
    bounds: tuple[float, float] = field(default=(math.inf, 0.0), repr=False, compare=False)  # least and most observed

    def __post_init__(self) -> None:
        if not self.knots:
            object.__setattr__(self, "knots", tuple(map(Knot, self.widths, self.seconds)))
            object.__setattr__(self, "bounds", (self.seconds[0], self.seconds[-1]))

    @classmethod
    def of(cls, knots: Sequence[Knot], bounds: tuple[float, float]) -> Curve:
        return cls(tuple([knot.width for knot in knots]), isotonic(knots), tuple(knots), bounds)

    @classmethod
    def typical(cls, tokens: int, seconds: float) -> Curve:
        """A prior from one pass over `tokens` tokens; any observation outweighs it.

        It errs on the side of long passes, so that until their times are known only drafts are verified of which much
        is likely to be right.
        """
        scale = seconds / cls(WIDTHS, CAUTIOUS)(tokens)
        knots = [Knot(width, share * scale, FAINT) for width, share in zip(WIDTHS, CAUTIOUS, strict=True)]
        return cls.of(knots, (knots[0].seconds, knots[-1].seconds))

    def __call__(self, tokens: int) -> float:
        """Seconds of a pass over `tokens` tokens."""
        widths, seconds = self.widths, self.seconds
        if tokens <= widths[0] or len(widths) == 1:
            return seconds[0]
        i = bisect_left(widths, tokens, 1, len(widths) - 1)
        w0, s0 = widths[i - 1], seconds[i - 1]
        return s0 + (seconds[i] - s0) * ((tokens - w0) / (widths[i] - w0))

    def best_size(
        self, sizes: tuple[int, ...], gains: list[float], unit: int, nodes: int, tokens: float, aside: float
    ) -> int:
        """Of ascending sizes of a draft the first of the largest goodput: expected tokens over seconds of the pass.

        gains: expected tokens by size. unit: nodes of the pass that a size has more than the one before it.
        nodes, tokens: of the pass with the first of the sizes. aside: seconds that the pass takes beyond the curve.
        """
        if (native := compiled()) is not None and len(self.widths) <= KNOTS:
            size: int = native.best_size(self.widths, self.seconds, sizes, gains, unit, nodes, tokens, aside)
            return size
        best, chosen = tokens / (self(nodes) + aside), sizes[0]
        for before, size in pairwise(sizes):
            nodes += unit * (size - before)
            tokens += gains[size] - gains[before]
            goodput = tokens / (self(nodes) + aside)
            if goodput > best:
                best, chosen = goodput, size
        return chosen

    def learned(self, tokens: int, seconds: float, rate: float, plain: int) -> Curve:
        """The curve after a pass over `tokens` tokens took `seconds`.

        Passes without drafts move the knots up to `plain`, the others those beyond it, so that the cost of drafts is
        not mixed with that of plain passes. The times of wider passes, as long as none was made, stay in proportion to
        the widest that one moves, as they were assumed. A pass that is faster than expected is believed sooner than one
        that is slower, since other work only adds time.

        seconds: ignored where it is not a possible time (0, negative, infinite, NaN).
        rate: 0 to 1, the weight of this pass against earlier ones of its kind.
        plain: tokens of a pass without drafts.
        """
        if not (math.isfinite(seconds) and seconds > 0 and rate > 0):
            return self
        seconds = min(seconds, HICCUP * self(tokens))
        curve = self._with_knots(tokens, seconds, plain)
        least, most = min(curve.bounds[0], seconds), max(curve.bounds[1], seconds)
        kept, fastest = 1 - rate, max(rate, FASTEST)
        if (native := compiled()) is not None and len(curve.widths) <= KNOTS:
            observed, bounds = (tokens, seconds, plain, kept, fastest), (FAINT, least, most)
            found = native.learned(Knot, curve.knots, curve.widths, curve.seconds, *observed, *bounds)
            return Curve(curve.widths, found[1], found[0], (least, most))
        expected, widest = curve(tokens), 0
        knots = [Knot(width, mean, max(passes * kept, FAINT)) for width, mean, passes in curve.knots]
        for i, near in curve._nearness(tokens, plain).items():
            if near:  # the time at this width, scaled by the curve
                width, mean, passes = curve.knots[i]
                passes = passes * kept + near
                implied = min(max(seconds * (curve.seconds[i] / expected), least), most)
                share = near / passes if implied < mean else min(near / passes, fastest)
                mean = min(max(mean + (implied - mean) * share, least), most)
                knots[i], widest = Knot(width, mean, max(passes, FAINT)), max(widest, i)
        if tokens > plain:
            factor = knots[widest].seconds / curve.knots[widest].seconds
            for i, (width, mean, passes) in enumerate(curve.knots[widest + 1 :], widest + 1):
                if passes <= FAINT:
                    knots[i] = Knot(width, min(max(mean * factor, least), most), FAINT)
        return Curve.of(knots, (least, most))

    def _with_knots(self, tokens: int, seconds: float, plain: int) -> Curve:
        """The curve with a knot at the width of plain passes, and one at least as wide as the pass."""
        missing = {}
        if plain not in self.widths:
            missing[plain] = min(self(plain), max(self.seconds[-1], seconds))
        if tokens > max(plain, self.widths[-1]):
            missing[1 << (tokens - 1).bit_length()] = seconds
        if not missing:
            return self
        knots = list(self.knots)
        for width, time in missing.items():
            insort(knots, Knot(width, time, FAINT), key=lambda knot: knot.width)
        return Curve.of(knots, (min(self.bounds[0], *missing.values()), max(self.bounds[1], *missing.values())))

    def _nearness(self, tokens: int, plain: int) -> dict[int, float]:
        """Interpolation weights of the knots beside a pass, by index; only those of its own kind."""
        i = min(bisect_left(self.widths, tokens), len(self.widths) - 1)
        if i == 0 or self.widths[i] == tokens:
            return {i: 1.0}
        w0, w1 = self.widths[i - 1 : i + 1]
        upper = min((tokens - w0) / (w1 - w0), 1.0)
        return {i: upper, i - 1: 1 - upper} if (w0 > plain) == (tokens > plain) else {i: 1.0}


def isotonic(knots: Sequence[Knot]) -> tuple[float, ...]:
    """The non-decreasing times nearest to those of the knots, each weighted by its passes (pool adjacent violators)."""
    means = tuple([knot.seconds for knot in knots])
    if all(map(le, means, means[1:])):
        return means
    pools: list[tuple[float, float, int]] = []  # mean, passes, knots
    for _, mean, passes in knots:
        count = 1
        while pools and pools[-1][0] > mean:
            before, weight, more = pools.pop()
            pooled = mean + (before - mean) * (weight / (weight + passes))
            mean, passes, count = min(max(pooled, mean), before), weight + passes, count + more
        pools.append((mean, passes, count))
    return tuple(mean for mean, _, count in pools for _ in range(count))
