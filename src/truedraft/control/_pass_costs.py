"""The cost of a step by its number of tokens: one estimate for all drafters of a target."""

from __future__ import annotations

import math
from typing import NamedTuple

from truedraft.drafters._base import PassCost
from truedraft.runtime import latency
from truedraft.runtime.curve import HICCUP, Curve
from truedraft.targets._base import Target

FEW = 8  # nodes per row over which the cost of one node is averaged
FIRST = 2  # passes without drafts before costs are estimated: the very first often waits for memory
BASE = 64  # stored tokens whose cost a row has beyond those it has stored
OUTSIDE = 2  # rows whose time outside the pass a step has beyond that of its own
LEAST = -0.75  # of the curve: bound of what a pass over the current rows takes less than by the curve
CHECKED = 2  # steps without drafts of about as many rows, before any are drafted for,
CHECKING = 0.01  # and later as many as cost this share of the time,
SPACED = 16  # but not within so many steps of the last


class PassCosts:
    """Seconds of a step: a pass over the tokens of all rows, and the engine's own time without drafts.

        seconds(tokens) = curve(tokens) + stored * (tokens stored + BASE * rows) + outside * (rows + OUTSIDE)

    curve: seconds of a pass by tokens, all rows together, of one row with a short context: the target's latency profile
        (`runtime/latency.py`), updated by passes over drafts.
    stored: seconds per token whose keys and values a pass reads, by the number of rows: also what it differs from the
        curve, which may have been measured when the machine was slower. outside: seconds of a step outside its pass.
        Both are estimated from steps without drafts, which are made from time to time where drafts pay in every step.
    measured: whether the curve comes from actual passes; nothing is drafted before that.
    """

    def __init__(self) -> None:
        self.curve = Curve.typical(1, 1.0)
        self.measured = False
        self.target: Target | None = None
        self._first: list[tuple[float, int]] = []  # seconds and tokens of the first passes, until `measured`
        self._stored: dict[int, Mean] = {}  # by size of the batch
        self._outside = Mean()
        self._rows, self._read = 1, BASE  # current rows, and what they have stored
        self._steps: dict[int, Steps] = {}  # by size of the batch
        self._of_rows = 0.0  # what `stored` and `outside` come to for them

    def measure(self, target: Target, steps: int) -> None:
        """Before a call in which a row may emit `steps` tokens: measure passes within a small share of its time."""
        if self.target is not target:
            self.target, self._profile = target, latency.of(target)
            self.measured, self._first = self._profile.kept is not None, []
            self.curve = self._profile.kept or self._profile.initial()
            self._stored, self._outside, self._steps = {}, Mean(), {}
        curve = self._profile.measure(steps, self.curve if self.measured else None)
        if curve is not None:
            self.curve, self.measured = curve, True

    def begin(self, rows: int, stored: int) -> None:
        """Set the rows of the next pass, and the number of tokens that they have stored."""
        self._rows, self._read = rows, stored + BASE * rows
        self._of_rows = self.reading + self.outside

    @property
    def reading(self) -> float:
        """Seconds of a pass over the current rows beyond those of the curve."""
        return max(self._of_batch.value * self._read, LEAST * self.curve(self._rows))

    @property
    def _size(self) -> int:
        """The size of the batch: equal for numbers of rows that differ by less than about a fifth."""
        return round(2 * math.log2(self._rows))

    @property
    def _of_batch(self) -> Mean:
        """`stored` of batches of this size, or of the size most like it."""
        if not self._stored:
            return Mean()
        return self._stored[min(self._stored, key=lambda size: abs(size - self._size))]

    def unchecked(self, saved: float) -> bool:
        """Whether the next step should be made without drafts, to know what such a step costs.

        saved: seconds per step that drafts are expected to save.
        """
        steps = self._steps.get(self._size, NONE)
        if steps.plain < CHECKED:
            return True
        return steps.since >= SPACED and steps.since * CHECKING * self(self._rows) > saved

    def made(self, drafts: bool) -> None:
        """Count the step of the current rows. drafts: whether any were requested for it."""
        plain, since = self._steps.get(self._size, NONE)
        self._steps[self._size] = Steps(plain, since + 1) if drafts else Steps(plain + 1, 0)

    @property
    def outside(self) -> float:
        """Seconds of a step outside its pass, without drafts."""
        return self._outside.value * (self._rows + OUTSIDE)

    def __call__(self, tokens: int) -> float:
        """Seconds of a step of the current rows over `tokens` tokens, without the time of drafting."""
        return self.curve(tokens) + self._of_rows

    def learn(self, tokens: int, seconds: float, rate: float) -> None:
        """Update by a pass of the current rows of `seconds` over `tokens` tokens."""
        plain = self._rows
        if not self.measured:
            self._first.append((seconds, tokens))
            least, width = min(self._first)
            self.curve, self.measured = Curve.typical(width, least), len(self._first) >= FIRST
        elif tokens > plain:
            self.curve = self.curve.learned(tokens, seconds - self.reading, rate, plain)
        else:
            expected, known = self.curve(plain), self._stored.setdefault(self._size, Mean(self._of_batch.value))
            known.add((min(seconds, HICCUP * (expected + self.reading)) - expected) / self._read, rate)

    def learn_outside(self, seconds: float, rate: float) -> None:
        """Update by the seconds of a step without drafts outside its pass."""
        usual = self.outside
        self._outside.add((min(seconds, HICCUP * usual) if usual > 0 else seconds) / (self._rows + OUTSIDE), rate)

    def per_node(self, plain: int, rows: int) -> PassCost:
        """Seconds of a step without drafts, over `plain` tokens, and of one more node in each of `rows` of its rows."""
        seconds = self(plain)
        return PassCost(seconds, (self(plain + rows * FEW) - seconds) / (rows * FEW))


class Steps(NamedTuple):
    """Steps without drafts so far, and steps with drafts since the last of them."""

    plain: int = 0
    since: int = 0


NONE = Steps()


class Mean:
    """A decayed mean: of all values as long as they are few, then by a rate."""

    def __init__(self, value: float = 0.0) -> None:
        self.value, self._count = value, 0

    def add(self, value: float, rate: float) -> None:
        self._count += 1
        self.value += (value - self.value) * max(rate, 1 / self._count)
