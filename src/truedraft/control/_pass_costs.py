"""The cost of a step by its number of tokens: one estimate for all drafters of a target."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from truedraft.drafters._base import PassCost
from truedraft.runtime import latency
from truedraft.runtime.curve import HICCUP, Curve
from truedraft.targets._base import Target

FEW = 8  # nodes per row over which the cost of one node is averaged
FIRST = 2  # passes without drafts before costs are estimated: the very first often waits for memory
BASE = 64  # stored tokens whose cost a row has beyond those it has stored
OUTSIDE = 2  # rows whose time outside the pass a step has beyond that of its own
LEAST = -0.75  # of the curve: bound of what a pass over the current rows takes less than by the curve
RECENT = 9  # steps without drafts in a median: single ones wait for other work, such as requests that arrive
CHECKED = 2  # steps without drafts of about as many rows, before any are drafted for,
SPACED = 16  # and more, with so many steps between them,
ENOUGH = 5  # until there are so many;
CHECKING = 0.01  # later as many as cost this share of the time


class PassCosts:
    """Seconds of a step: a pass over the tokens of all rows, and the engine's own time without drafts.

        seconds(tokens) = curve(tokens) + stored * (tokens stored + BASE * rows) + outside * (rows + OUTSIDE)

    `stored` is the time per token whose keys and values a pass reads, and what the pass differs from a curve that was
    measured when the machine was slower; `outside` that of a step outside its pass. Both are estimated from steps
    without drafts of about as many rows, which are made from time to time where drafts pay in every step.

    curve: seconds of a pass by tokens, all rows together, of one row with a short context: the target's latency profile
        (`runtime/latency.py`), updated by passes over drafts.
    entered: whether the current step is the first of its rows: it waits for memory that reading the prompts took from
        the caches, so nothing is learnt from it.
    measured: whether the curve comes from actual passes; nothing is drafted before that.
    carried: tokens that the next pass reads besides those of its trees; see `Target.carried`.
    reading, outside: what the second and the third term come to for the current rows, in seconds; `aside` is their sum.
    plain: seconds of a step of the current rows without drafts, if no earlier ones had left tokens to be read again.
    """

    def __init__(self) -> None:
        self.curve = Curve.typical(1, 1.0)
        self.measured = False
        self.target: Target | None = None
        self._first: list[tuple[float, int]] = []  # seconds and tokens of the first passes, until `measured`
        self._batches: dict[int, PlainSteps] = {}  # by the size of the batch
        self._batch = PlainSteps()  # of the current rows
        self._rows, self._read = 1, BASE  # current rows, and what they have stored
        self.carried, self.entered = 0, False
        self.reading = self.outside = self.aside = 0.0
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
        self._rows, self._read, self.entered = rows, stored + BASE * rows, entered
        self.carried = 0 if self.target is None else self.target.carried
        size = round(2 * math.log2(rows))  # equal for numbers of rows that differ by less than about a fifth
        batch = self._batches.get(size)
        if batch is None:
            like = min(self._batches, key=lambda other: abs(other - size), default=None)
            batch = self._batches[size] = PlainSteps() if like is None else self._batches[like].begun()
        self._batch = batch
        of_curve = self.curve(rows)
        self.reading = max(batch.stored * self._read, LEAST * of_curve)
        self.outside = batch.outside * (rows + OUTSIDE)
        self.aside = self.reading + self.outside
        self.plain = of_curve + self.aside

    def unchecked(self, saved: float) -> bool:
        """Whether the next step should be made without drafts, to know what such a step costs.

        saved: seconds per step that drafts are expected to save.
        """
        made, since = self._batch.made, self._batch.since
        few = made < ENOUGH or since * CHECKING * self.plain > saved
        return made < CHECKED or (since >= SPACED and few and not self.entered)

    def step(self, drafts: bool) -> None:
        """Count the step of the current rows. drafts: whether any were requested for it."""
        if not self.entered:
            self._batch.since = self._batch.since + 1 if drafts else 0
            self._batch.made += not drafts

    def __call__(self, tokens: int) -> float:
        """Seconds of a step of the current rows over `tokens` tokens, without the time of drafting."""
        return self.curve(tokens + self.carried) + self.aside

    def without_carry(self, tokens: int) -> float:
        """The same if no earlier drafts had left tokens to be read again."""
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
            self._batch.add_pass((min(seconds, HICCUP * (expected + self.reading)) - expected) / self._read)

    def learn_outside(self, seconds: float) -> None:
        """Update by the seconds of a step without drafts outside its pass."""
        self._batch.add_outside(seconds / (self._rows + OUTSIDE))

    def per_node(self, plain: int, rows: int) -> PassCost:
        """Seconds of a step without drafts, over `plain` tokens, and of one more node in each of `rows` of its rows."""
        seconds = self(plain)
        return PassCost(seconds, (self(plain + rows * FEW) - seconds) / (rows * FEW))


class PlainSteps:
    """The latest steps without drafts of about as many rows.

    made: number of them so far. since: steps with drafts since then.
    stored, outside: see `PassCosts`; medians.
    """

    def __init__(self, stored: float = 0.0, outside: float = 0.0) -> None:
        self.stored, self.outside = stored, outside
        self.made = self.since = 0
        self._stored: deque[float] = deque(maxlen=RECENT)
        self._outside: deque[float] = deque(maxlen=RECENT)

    def begun(self) -> PlainSteps:
        """For batches of another size: as long as there are no steps of it, they are assumed to cost the same."""
        return PlainSteps(self.stored, self.outside)

    def add_pass(self, stored: float) -> None:
        self._stored.append(stored)
        self.stored = median(self._stored)

    def add_outside(self, outside: float) -> None:
        self._outside.append(outside)
        self.outside = median(self._outside)
