"""Whether a drafter may draft: accounts of what its drafts saved and lost, and of what trials may cost."""

from __future__ import annotations

from dataclasses import dataclass

FAVOUR = 0.5  # plain passes that drafts are taken to save, before any was made
DEAR = 0.5  # of a plain pass, for a draft: it has to pay on the whole, not now and then
RESERVE = 4.0  # plain passes that are kept for trials, at most
CREDIT = 16.0  # plain passes that drafts which are expected to pay may lose before they have earned any
EARNED = 32.0  # plain passes that drafts saved which they may lose again, at most


@dataclass
class TrialBudget:
    """Seconds that a drafter's drafts may lose, in passes and between them.

    Drafts that are expected to pay are held to it: what they take is drawn from what they saved. Where that is spent
    they are trials, as are those that are not expected to pay; trials may take `slack` of the time of passes, and a
    drafter that has spent its share is not asked until passes have made up for it.

    slack: share of the time of passes that may be lost to trials.
    memory: weight that a draft's expected saving keeps at each later one.
    saving: seconds that a draft lately was expected to save.
    """

    slack: float
    memory: float
    saving: float = 0.0
    _favour: float = FAVOUR  # the same in plain passes, at most what is assumed of a new drafter
    _left: float = 0.0  # seconds that trials may still lose
    _earned: float = 0.0  # seconds that drafts have saved of late, all that they took drawn from it
    _solvent: bool = True  # whether the latest drafts were drawn from that account

    def begin(self, plain: float) -> None:
        """A new call, in which a plain pass takes `plain` seconds."""
        self.saving, self._solvent = self._favour * plain, True

    @property
    def left(self) -> bool:
        """Whether a draft may be verified that is not expected to pay."""
        return self._left > 0

    def settle(self, lost: float, passed: float, plain: float) -> None:
        """Book the latest pass.

        lost: seconds that drafts took beyond what they saved; negative where they paid.
        passed: seconds of passes since the booking before, as far as this drafter has a share in them.
        plain: seconds of a pass without drafts.
        """
        allowed = self.slack * max(passed, 0.0)
        left = self._left + allowed - (0.0 if self._solvent else lost)
        self._left = min(max(left, -RESERVE * plain), RESERVE * plain)
        # as much at most, lest it is lost again where drafts turn bad, and as little that better ones soon count
        self._earned = min(max(self._earned - lost, -2 * CREDIT * plain), EARNED * plain)

    def permits(self, pays: bool, plain: float) -> bool:
        """Whether to draft for the next pass. pays: whether the drafts are expected to pay."""
        self._solvent = pays and self._earned >= -CREDIT * plain
        return self._solvent or self._left >= 0

    def expect(self, saved: float, drafting: float, plain: float) -> None:
        """A draft is expected to save `saved` seconds, and took `drafting`."""
        self.saving = self.memory * self.saving + (1 - self.memory) * saved
        if saved > 0 and drafting < DEAR * plain:  # quick to take up again what was given up
            self.saving = max(self.saving, saved / 2)
        elif saved < -plain:  # and to give up what costs more than a pass
            self.saving = min(self.saving, 0.0)
        self._favour = min(self.saving / plain, FAVOUR)
