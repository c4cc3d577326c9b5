"""Decides whether passes read probes: they cost time in their pass, and pay, if at all, in later ones."""

from __future__ import annotations

from dataclasses import dataclass, field

BLOCK = 16  # consecutive passes with or without probes: their gain comes some passes later
MEMORY = 0.97  # weight that a pass keeps at each later one of its arm


@dataclass
class _Arm:
    tokens: float = 0.0
    seconds: float = 0.0

    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Probing:
    """Compares passes with and without probes by tokens per second; the worse arm is tried again now and then."""

    on: bool = False
    _left: int = 0  # passes left in the current block
    _arms: tuple[_Arm, _Arm] = field(default_factory=lambda: (_Arm(), _Arm()))  # without, with
    _lost: float = 0.0  # seconds spent on trials in this call

    def begin(self) -> None:
        """A new call, with its own allowance for trials."""
        self._lost = 0.0

    def decide(self, more: float, allowed: float) -> bool:
        """Whether the next pass reads the probes.

        more: seconds that they add to it. allowed: seconds that trials of this call may have cost so far.
        """
        if self._left > 0:
            self._left -= 1
            return self.on
        without, with_ = (arm.rate() for arm in self._arms)
        better = with_ > without
        trial = not better and self._lost + BLOCK * more <= allowed
        if trial:
            self._lost += BLOCK * more
        self.on, self._left = better or trial, BLOCK - 1
        return self.on

    def observe(self, tokens: float, seconds: float) -> None:
        """Record the tokens and seconds of a pass."""
        arm = self._arms[self.on]
        arm.tokens = arm.tokens * MEMORY + tokens
        arm.seconds = arm.seconds * MEMORY + seconds
