"""The cost of a pass by its number of tokens: one estimate for all drafters of a target."""

from __future__ import annotations

from truedraft.drafters._base import PassCost
from truedraft.runtime import latency
from truedraft.runtime.curve import Curve
from truedraft.targets._base import Target

FEW = 8  # nodes per row over which the cost of one node is averaged
FIRST = 2  # passes without drafts before costs are estimated: the very first often waits for memory


class PassCosts:
    """Seconds of a pass, from the target's latency profile (`runtime/latency.py`), updated by each pass.

    curve: seconds by tokens, all rows together.
    measured: whether the curve comes from actual passes; nothing is drafted before that.
    """

    def __init__(self) -> None:
        self.curve = Curve.typical(1, 1.0)
        self.measured = False
        self.target: Target | None = None
        self._first: list[tuple[float, int]] = []  # seconds and tokens of the first passes, until `measured`

    def measure(self, target: Target, steps: int) -> None:
        """Before a call in which a row may emit `steps` tokens: measure passes within a small share of its time."""
        if self.target is not target:
            self.target, self._profile = target, latency.of(target)
            self.measured, self._first = self._profile.kept is not None, []
            self.curve = self._profile.kept or self._profile.initial()
        curve = self._profile.measure(steps, self.curve if self.measured else None)
        if curve is not None:
            self.curve, self.measured = curve, True

    def learn(self, tokens: int, seconds: float, rate: float, plain: int) -> None:
        """Update by a pass of `seconds` over `tokens` tokens; without drafts it would have had `plain` tokens."""
        if self.measured:
            self.curve = self.curve.learned(tokens, seconds, rate, plain)
        else:
            self._first.append((seconds, tokens))
            least, width = min(self._first)
            self.curve, self.measured = Curve.typical(width, least), len(self._first) >= FIRST

    def per_node(self, plain: int, rows: int) -> PassCost:
        """Seconds of a pass without drafts, over `plain` tokens, and of one more node in each of `rows` of its rows."""
        seconds = self.curve(plain)
        return PassCost(seconds, (self.curve(plain + rows * FEW) - seconds) / (rows * FEW))
