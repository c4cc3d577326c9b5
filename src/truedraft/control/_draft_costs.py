"""What drafting costs: the seconds that a draft takes beside the pass that verifies it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

RECENT = 9  # drafts whose time counts
HICCUP = 4.0  # times the usual time, of a draft or of a pass, of which no more is held against drafts


@dataclass
class DraftCosts:
    """Seconds of a drafter's drafts, all of its rows together.

    memory: weight that the time of a level keeps at each later draft.
    levels: depth of the drafts at hand, where each level costs a pass of a model; else 0.
    """

    memory: float
    levels: int = 0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _of_levels: tuple[float, float] = (0.0, 0.0)  # seconds of recent drafting after the first, and levels that it gave

    @property
    def seconds(self) -> float:
        """That drafting and learning take a pass; the median, since now and then one waits for other work."""
        return median(self._recent) if self._recent else 0.0

    @property
    def of_level(self) -> float:
        """Seconds that a level of a draft takes; 0 where levels cost nothing of their own."""
        seconds, levels = self._of_levels
        return seconds / levels if levels else 0.0

    def add(self, drafting: float, took: float, usual: bool) -> float:
        """Book a draft; the seconds of it that count against drafts.

        drafting: seconds of proposing alone. took: with observing and control.
        usual: whether its time tells that of later ones; after a pause a drafter first reads what was emitted in it.
        """
        if usual:
            self._recent.append(took)
        if self.levels:
            seconds, levels = self._of_levels
            self._of_levels = seconds * self.memory + max(drafting, 0.0), levels * self.memory + self.levels
        return min(took, HICCUP * self.seconds) if self._recent else took
