"""The measured seconds of a level of a draft."""

from __future__ import annotations

import time
from collections.abc import Sequence

from truedraft.drafters._base import usual_seconds
from truedraft.drafters._growing import GrowingDrafter, GrowingTree


class TimedLevels(GrowingDrafter):
    """A drafter that measures its levels, for drafts sized by what these cost."""

    _of_level = 0.0  # seconds of a level after the first; a moving average

    def _level(self, active: Sequence[GrowingTree]) -> None:
        begins = any(tree.frontier == [tree.root] for tree in active)
        start = time.perf_counter()
        super()._level(active)
        self._measure(time.perf_counter() - start, begins)

    def _measure(self, seconds: float, begins: bool) -> None:
        """The time of a level. begins: whether it was the first of a draft."""
        if begins:  # it reads more tokens than later levels, and bounds their time where these were interrupted
            self._of_level = min(self._of_level, seconds)
        else:
            self._of_level = usual_seconds(self._of_level, seconds)
