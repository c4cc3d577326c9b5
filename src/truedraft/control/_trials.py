"""Decides whether a drafter may draft: accounts of the time that its drafts saved and lost, and of trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

FAVOUR = 0.5  # assumed saving of a new drafter, in plain passes
QUICK = 0.4  # weight of the latest draft in the expected saving, if it takes as long as a plain pass
DEAR = 0.5  # of a plain pass: a draft that costs more has to pay on average, not now and then
RESERVE = 1.0  # most plain passes that trials may accumulate
CREDIT = 8.0  # plain passes that drafts expected to pay may lose before they saved any
EARNED = 32.0  # most saved plain passes that drafts may lose again
OWED = 2.0  # most plain passes that drafts expected to pay may leave to be replenished before trials


@dataclass
class TrialBudget:
    """Accounts of the seconds that a drafter's drafts may lose, in passes and between them.

    Drafts that are expected to pay are charged to the time that earlier ones saved. Once that is spent they are trials,
    as are drafts that are not expected to pay. Trials may use `slack` of the time of passes; a drafter that has used
    its share does not draft until further passes have replenished it. What drafts expected to pay lose before any saved
    time uses up the share too.

    slack: share of the time of passes that may be lost to trials.
    memory: weight that a draft's expected saving keeps at each later one, of cheap drafts.
    saving: moving average of the seconds that a draft is expected to save.
    """

    slack: float
    memory: float
    saving: float = 0.0
    _favour: float = FAVOUR  # the same in plain passes, at most that assumed for a new drafter
    _left: float = 0.0  # seconds that trials may still lose
    _full: bool = False  # whether these are the most that they may be
    _earned: float = 0.0  # seconds that drafts have saved, less those that they lost
    _solvent: bool = True  # whether the latest drafts were charged to that account

    def begin(self, plain: float) -> None:
        """A new call. plain: seconds of a pass without drafts."""
        self.saving, self._solvent = self._favour * plain, True

    def affords(self, lost: float) -> bool:
        """Whether to verify drafts that are expected to lose some seconds: those left for it cover them, or are as many
        as they become, since the expectation may be wrong."""
        return lost < self._left or self._full

    def settle(self, lost: float, passed: float, plain: float) -> None:
        """Account for the latest pass.

        lost: seconds of drafts beyond those that they saved; negative where they paid.
        passed: this drafter's share of the seconds of passes since the last call of `settle`.
        plain: seconds of a pass without drafts.
        """
        allowed = self.slack * max(passed, 0.0)
        left = self._left + allowed
        if not self._solvent:
            left -= lost
        elif self._earned < 0:
            left = max(left - lost, min(left, -OWED * plain))
        self._left = min(left, RESERVE * plain)
        self._full = left >= RESERVE * plain
        # bounded above so that bad drafts stop soon, and below so that better ones soon resume
        self._earned = min(max(self._earned - lost, -2 * CREDIT * plain), EARNED * plain)

    def exhausted(self, plain: float) -> bool:
        """Whether drafts are not permitted, whatever is expected of them."""
        return self._left < 0 and self._earned < -CREDIT * plain

    @property
    def owing(self) -> bool:
        """Whether drafts have lost as much time as they have saved, of late."""
        return self._earned <= 0

    def permits(self, pays: bool, plain: float) -> bool:
        """Whether to draft for the next pass. pays: whether the drafts are expected to pay."""
        self._solvent = pays and self._earned >= -CREDIT * plain
        return self._solvent or self._left >= 0

    def pause(self, plain: float) -> int:
        """Passes of `plain` seconds until trials may lose time again, where drafts are not permitted."""
        return 0 if self._solvent or not self.slack else math.ceil(max(-self._left, 0.0) / (self.slack * plain))

    def expect(self, saved: float, drafting: float, plain: float) -> None:
        """Update the expected saving by a draft: seconds that it is expected to save, and seconds of drafting. The more
        a draft costs, the fewer are made to find out."""
        weight = max(1 - self.memory, QUICK * min(drafting / plain, 1.0))
        self.saving += weight * (saved - self.saving)
        if saved > 0 and drafting < DEAR * plain:  # resume drafting quickly
            self.saving = max(self.saving, saved / 2)
        elif saved < -plain:  # and stop quickly what costs more than a pass
            self.saving = min(self.saving, 0.0)
        self._favour = min(self.saving / plain, FAVOUR)
