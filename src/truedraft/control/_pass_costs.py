"""What a pass costs by the number of tokens in it: one estimate for all drafters of a target."""

from __future__ import annotations

from truedraft.drafters._base import PassCost
from truedraft.runtime import latency as calibration
from truedraft.runtime.curve import Curve
from truedraft.targets._base import Target

FEW = 8  # nodes a row by which the cost of one is measured
FIRST = 2  # passes without drafts, before any costs are known: the very first often waits for memory


class PassCosts:
    """Seconds of a pass, from a calibration of the target (`runtime/latency.py`), corrected by the passes at hand.

    curve: seconds by tokens, all rows together.
    known: whether the curve is of passes that were made; until then, nothing is worth drafting.
    """

    def __init__(self) -> None:
        self.curve = Curve.typical(1, 1.0)
        self.known = False
        self.target: Target | None = None
        self._first: list[tuple[float, int]] = []  # seconds and tokens of the first passes, until the curve is known

    def measure(self, target: Target, steps: int) -> None:
        """Before a call in which a row may emit `steps` tokens, of which a small share of the time is measured for."""
        if self.target is not target:
            self.target, self._calibration = target, calibration.of(target)
            self.known, self._first = self._calibration.kept is not None, []
            self.curve = self._calibration.kept or self._calibration.guess()
        measured = self._calibration.measure(steps, self.curve if self.known else None)
        if measured is not None:
            self.curve, self.known = measured, True

    def learn(self, tokens: int, seconds: float, rate: float, plain: int) -> None:
        """A pass over `tokens` tokens took `seconds`; without drafts it would have been over `plain`."""
        if self.known:
            self.curve = self.curve.learned(tokens, seconds, rate, plain)
        else:
            self._first.append((seconds, tokens))
            least, width = min(self._first)
            self.curve, self.known = Curve.typical(width, least), len(self._first) >= FIRST

    def per_node(self, plain: int, rows: int) -> PassCost:
        """Seconds of a pass without drafts, over `plain` tokens, and of one more node for each of `rows` rows of it."""
        seconds = self.curve(plain)
        return PassCost(seconds, (self.curve(plain + rows * FEW) - seconds) / (rows * FEW))
