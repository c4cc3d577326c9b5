"""Whether to draft another token, by Thompson sampling (EESD, arXiv 2406.03853, section 3.2)."""

from __future__ import annotations

import random


class Bandit:
    """Whether to draft on, by Thompson sampling: the rate of acceptance has a beta distribution.

    accepted, rejected: tokens, and one of each before any.
    """

    def __init__(self) -> None:
        self.accepted = self.rejected = 1.0
        self._random = random.Random(0)

    def continues(self) -> bool:
        """Whether the next token is drafted: with a rate drawn from the distribution."""
        return self._random.random() < self._random.betavariate(self.accepted, self.rejected)

    def update(self, accepted: int, rejected: int) -> None:
        """Count the outcome of a draft."""
        self.accepted += accepted
        self.rejected += rejected
