"""The cost of a step by its number of tokens: one estimate for all drafters of a target."""

from __future__ import annotations

import math
from collections import deque
from itertools import combinations
from statistics import median
from typing import Generic, TypeVar

from truedraft.drafters._base import PassCost
from truedraft.runtime import latency
from truedraft.runtime.curve import HICCUP, Curve
from truedraft.targets._base import Target

FEW = 8  # nodes per row over which the cost of one node is averaged
FIRST = 2  # passes without drafts before costs are estimated: the very first often waits for memory
NEAR = 64  # stored tokens by which two passes differ at least that show what these cost
OUTSIDE = 2  # rows whose time outside the pass a step has beyond that of its own
LEAST = -0.75  # of the curve: bound of what a pass over the current rows takes less than by the curve
RECENT = 9  # steps without drafts in a median: single ones wait for other work, such as requests that arrive
BEFORE = 2  # steps without drafts of about as many rows, before any are drafted for
CHECK = 8  # later so many in a row are made, to learn from
WARM = 5  # from those behind so many others: after drafts, the processor's caches are full of what these used
SPACED = 16  # steps between checks, at least; the first is due after as many
ENOUGH = 5  # steps learnt from in checks, until when these may cost
EARLY = 0.04  # so large a share of the time,
CHECKING = 0.01  # and from when on

T = TypeVar("T")


class PassCosts:
    """Seconds of a step: a pass over the tokens of all rows, and the engine's own time without drafts.

        seconds(tokens) = curve(tokens) + reading + (outside + verifying, with drafts) * (rows + OUTSIDE)

    `reading` is what a pass over the current rows takes beyond the curve: it reads the keys and values that they have
    stored, and the machine may be slower than when the curve was measured, or faster. `outside` is the time of a step
    outside its pass. Both are estimated from steps without drafts of about as many rows. `verifying` is what a step
    that verifies drafts takes outside its pass beyond one whose drafts were all cut off. Where drafts pay in every
    step, some steps without are made from time to time, in a row: of small models, a step right after drafts takes up
    to a third longer than one after others without drafts.

    curve: seconds of a pass by tokens, all rows together, of one row with a short context: the target's latency profile
        (`runtime/latency.py`), updated by passes over drafts.
    entered: whether the current step is the first of its rows: it waits for memory that reading the prompts took from
        the caches, so nothing is learnt from it.
    measured: whether the curve comes from actual passes; nothing is drafted before that.
    carried: tokens that the next pass reads besides those of its trees; see `Target.carried`.
    reading, outside, verifying: these terms for the current rows, in seconds; `aside` is the sum of the first two.
    plain: seconds of a step of the current rows without drafts, if no earlier ones had left tokens to be read again.
    """

    def __init__(self) -> None:
        self.curve = Curve.typical(1, 1.0)
        self.measured = False
        self.target: Target | None = None
        self._first: list[tuple[float, int]] = []  # seconds and tokens of the first passes, until `measured`
        self._batches: dict[int, PlainSteps] = {}  # by the size of the batch
        self._batch = PlainSteps()  # of the current rows
        self._rows, self._read = 1, 0  # current rows, and the tokens that they have stored
        self.carried, self.entered = 0, False
        self._checking, self._run = False, 0  # whether a check goes on; steps without drafts, in a row
        self.reading = self.outside = self.aside = self.verifying = 0.0
        self.plain = self.curve(1)

    def measure(self, target: Target, steps: int, most: int) -> None:
        """Before a call in which a row may emit `steps` tokens: measure passes of up to `most` tokens within a small
        share of its time."""
        if self.target is not target:
            self.target, self._profile = target, latency.of(target)
            self.measured, self._first = self._profile.kept is not None, []
            self.curve = self._profile.kept or self._profile.initial()
            self._batches = {}
        curve = self._profile.measure(steps, self.curve if self.measured else None, most)
        if curve is not None:
            self.curve, self.measured = curve, True

    def begin(self, rows: int, stored: int, entered: bool) -> None:
        """Set the rows of the next pass, the number of tokens that they have stored, and whether rows have entered or
        left since the last one."""
        self._rows, self._read, self.entered = rows, stored, entered
        self.carried = 0 if self.target is None else self.target.carried
        size = round(2 * math.log2(rows))  # equal for numbers of rows that differ by less than about a fifth
        batch = self._batches.get(size)
        if batch is None:
            like = min(self._batches, key=lambda other: abs(other - size), default=None)
            batch = self._batches[size] = PlainSteps() if like is None else self._batches[like].begun()
        self._batch = batch
        of_curve = self.curve(rows)
        self.reading = batch.excess_over(of_curve, stored)
        self.outside, self.verifying = batch.outside * (rows + OUTSIDE), batch.verifying * (rows + OUTSIDE)
        self.aside = self.reading + self.outside
        self.plain = of_curve + self.aside

    def checks(self, saved: float) -> bool:
        """Whether the next step is made without drafts, to learn what such a step costs.

        saved: seconds per step that drafts are expected to save.
        """
        batch = self._batch
        if batch.made < BEFORE:
            return True
        if batch.since >= SPACED and not self.entered:
            share = CHECKING if self.known else EARLY
            self._checking = not batch.learnt or batch.since * share * self.plain > CHECK * saved
        return self._checking

    def step(self, drafts: bool) -> None:
        """Count the step of the current rows. drafts: whether any were requested for it."""
        self._run = 0 if drafts or self.entered else self._run + 1
        self._checking = self._checking and 0 < self._run < CHECK
        if not self.entered:
            self._batch.since = self._batch.since + 1 if drafts else 0
            self._batch.made += not drafts

    @property
    def cold(self) -> int:
        """Steps without drafts that come before those that are learnt from, if all steps are to be made without."""
        return max(WARM - self._run, 0) if self._batch.made >= BEFORE else 0

    @property
    def unlearnt(self) -> int:
        """Steps of the current check that come before those that it learns from."""
        return self.cold if self._checking and self._batch.learnt else 0

    @property
    def known(self) -> bool:
        """Whether enough steps without drafts of about as many rows were learnt from."""
        return self._batch.learnt >= ENOUGH

    def rest(self) -> None:
        """Count a step without drafts that nothing is learnt from."""
        self.entered = False
        self._run += 1

    def __call__(self, tokens: int) -> float:
        """Seconds of a step of the current rows over `tokens` tokens, without the time of drafting."""
        aside = self.aside + self.verifying if tokens > self._rows else self.aside
        return self.curve(tokens + self.carried) + aside

    def without_carry(self, tokens: int) -> float:
        """The same without `verifying`, and if no earlier drafts had left tokens to be read again."""
        return self.curve(tokens) + self.aside

    def learn(self, tokens: int, seconds: float, rate: float) -> None:
        """Update by a pass of the current rows of `seconds` over `tokens` tokens."""
        plain, width = self._rows, tokens + self.carried
        if not self.measured:
            self._first.append((seconds, width))
            least, width = min(self._first)
            self.curve, self.measured = Curve.typical(width, least), len(self._first) >= FIRST
        elif self.entered:
            return
        elif width > plain:
            self.curve = self.curve.learned(width, seconds - self.reading, rate, plain)
        else:
            expected = self.curve(plain)
            self._batch.add_pass(self._read, min(seconds, HICCUP * (expected + self.reading)), self._run >= WARM)

    def learn_outside(self, seconds: float) -> None:
        """Update by the seconds of the last step outside its pass, which had no drafts."""
        self._batch.add_outside(seconds / (self._rows + OUTSIDE), self._run > WARM)

    def learn_drafted(self, seconds: float, verified: bool) -> None:
        """Update by the seconds of the last step outside its pass and its drafting, for which drafts were requested.

        verified: whether any of them were.
        """
        self._batch.add_drafted(seconds / (self._rows + OUTSIDE), verified)

    def per_node(self, plain: int, rows: int) -> PassCost:
        """Seconds of a step without drafts, over `plain` tokens, and of one more node in each of `rows` of its rows."""
        width = plain + self.carried
        more = self.curve(width + rows * FEW) - self.curve(width)
        return PassCost(self(plain), more / (rows * FEW))


class PlainSteps:
    """The latest steps without drafts of about as many rows, those behind `WARM` others as soon as there are any; and
    what the latest ones with drafts took besides.

    made: number of steps so far. learnt: of those behind `WARM` others. since: steps with drafts since the last of all.
    excess: seconds of a pass beyond the curve, as last estimated. outside, verifying: see `PassCosts`; by medians.
    """

    def __init__(self, excess: float = 0.0, outside: float = 0.0, verifying: float = 0.0) -> None:
        self.excess, self.outside, self.verifying = excess, outside, verifying
        self.made = self.learnt = self.since = 0
        self._passes, self._outside = Recent[tuple[int, float]](), Recent[float]()
        self._drafted = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)  # without and with any verified
        self._unverified = 0  # steps with drafts since the last one in which any were verified
        self._least, self._slope = 0.0, 0.0  # seconds of a pass over nothing stored, and of each stored token

    def begun(self) -> PlainSteps:
        """For batches of another size: as long as there are no steps of it, they are assumed to cost the same."""
        return PlainSteps(self.excess, self.outside, self.verifying)

    def excess_over(self, of_curve: float, stored: int) -> float:
        """Seconds of a pass beyond those by the curve. stored: tokens whose keys and values it reads."""
        if passes := self._passes.values:
            known = min(stored, 2 * max(passes)[0])  # farther from what was observed, the slope says little
            self.excess = max(self._least + self._slope * known - of_curve, LEAST * of_curve)
        return self.excess

    def add_pass(self, stored: int, seconds: float, warm: bool) -> None:
        """Fit a line to the seconds of passes by what they read, by medians (Theil 1950, Sen 1968).

        warm: whether the step was behind `WARM` others.
        """
        self.learnt += warm
        if self._passes.add((stored, seconds), warm):
            passes = self._passes.values
            slopes = [(t - s) / (n - m) for (m, s), (n, t) in combinations(passes, 2) if abs(n - m) >= NEAR]
            self._slope = max(median(slopes), 0.0) if slopes else 0.0
            self._least = median([s - self._slope * n for n, s in passes])

    def add_outside(self, outside: float, warm: bool) -> None:
        """See `add_pass`."""
        if self._outside.add(outside, warm):
            self.outside = median(self._outside.values)

    def add_drafted(self, outside: float, verified: bool) -> None:
        """See `PassCosts.learn_drafted`. Where nothing is verified any more, what that took is forgotten: it may be
        why, and the machine may have been busy."""
        self._drafted[verified].append(outside)
        self._unverified = 0 if verified else self._unverified + 1
        without, with_ = self._drafted
        if self._unverified >= RECENT:
            with_.clear()
        known = min(len(without), len(with_)) >= ENOUGH
        self.verifying = max(median(with_) - median(without), 0.0) if known else 0.0


class Recent(Generic[T]):
    """The latest observations of warm steps, or of any as long as there are no warm ones."""

    def __init__(self) -> None:
        self.values, self._warm = deque[T](maxlen=RECENT), False

    def add(self, value: T, warm: bool) -> bool:
        """Whether it counts."""
        if warm and not self._warm:
            self.values.clear()
            self._warm = True
        if counts := warm or not self._warm:
            self.values.append(value)
        return counts
