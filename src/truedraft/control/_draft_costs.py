"""The cost of drafting: the seconds of a draft besides those of the pass that verifies it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

RECENT = 9  # drafts in the median
HICCUP = 4.0  # times the usual time of a draft or a pass: what exceeds it is not counted against drafts


@dataclass
class DraftCosts:
    """Seconds of a drafter's drafts, all of its rows together.

    memory: weight that the time of a level keeps at each later draft.
    levels: depth of the current drafts, where each level costs a pass of a model; else 0.
    seconds: of drafting and observing per pass; the median, since single passes may wait for other work.
    """

    memory: float
    levels: int = 0
    seconds: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _unusual: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _of_levels: tuple[float, float] = (0.0, 0.0)  # decayed seconds of drafting, and levels drafted

    @property
    def of_level(self) -> float:
        """Seconds per level of a draft; 0 where levels have no cost of their own."""
        seconds, levels = self._of_levels
        return seconds / levels if levels else 0.0

    def add(self, drafting: float, spent: float, usual: bool) -> float:
        """Add a draft; returns the seconds of it that count against drafts.

        drafting: seconds of proposing alone. spent: with observing and control.
        usual: whether later drafts will take as long; after a pause a drafter first reads the tokens emitted in it.
        """
        alike = self._recent if usual else self._unusual
        alike.append(spent)
        if usual:
            self.seconds = median(alike)
        if self.levels:
            seconds, levels = self._of_levels
            self._of_levels = seconds * self.memory + max(drafting, 0.0), levels * self.memory + self.levels
        return min(spent, HICCUP * median(alike))
