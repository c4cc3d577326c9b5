"""The cost of drafting: the seconds of a draft besides those of the pass that verifies it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 9  # drafts in the median
ALIKE = 0.05  # weight, in drafts, of the assumption that a draft takes as long besides its levels as for one of them
HICCUP = 4.0  # times the usual time of a draft or a pass: what exceeds it is not counted against drafts


@dataclass
class DraftCosts:
    """Seconds of a drafter's drafts, all of its rows together.

    memory: weight that the time of a level keeps at each later draft.
    levels: depth of the current drafts, where each level costs a pass of a model; else 0.
    seconds: of drafting and observing per pass; the median, since single passes may wait for other work.
    of_level, of_draft: seconds of drafting per level, and of what a draft takes besides, whatever its levels; 0 where
        levels have no cost of their own.
    """

    memory: float
    levels: int = 0
    seconds: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _unusual: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _sums: tuple[float, ...] = (0.0,) * 5  # decayed: drafts, levels, their squares, seconds, levels times seconds
    of_level: float = 0.0
    of_draft: float = 0.0

    def of_levels(self, levels: int) -> float:
        """Seconds of a draft of so many levels; 0 where levels have no cost of their own."""
        return self.of_draft + levels * self.of_level if levels else 0.0

    def add(self, drafting: float, spent: float, usual: bool) -> float:
        """Add a draft; returns the seconds of it that count against drafts.

        drafting: seconds of proposing alone. spent: with observing and control.
        usual: whether later drafts will take as long; after a pause a drafter first reads the tokens emitted in it.
        """
        alike = self._recent if usual else self._unusual
        alike.append(spent)
        typical = sorted(alike)[len(alike) // 2]
        if usual:
            self.seconds = typical
        if self.levels:
            self._fit(max(drafting, 0.0))
        return min(spent, HICCUP * typical)

    def _fit(self, drafting: float) -> None:
        """Fit a line to the seconds of drafts by their levels. As long as these are alike, a draft is taken to have as
        much besides its levels as one of them takes: with what is unread of a row, the first reads the most."""
        n = float(self.levels)
        count, levels, squares, seconds, products = self._sums = tuple(
            before * self.memory + now
            for before, now in zip(self._sums, (1.0, n, n * n, drafting, n * drafting), strict=True)
        )
        a, b, c = count + ALIKE, levels - ALIKE, squares + ALIKE
        determinant = a * c - b * b
        besides, each = (c * seconds - b * products) / determinant, (a * products - b * seconds) / determinant
        if each < 0:
            besides, each = seconds / count, 0.0
        elif besides < 0:
            besides, each = 0.0, products / squares
        self.of_draft, self.of_level = besides, each
