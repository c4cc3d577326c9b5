"""Whether probes pay: they cost in the pass that reads them and gain, if at all, in later ones."""

from __future__ import annotations

from dataclasses import dataclass, field

BLOCK = 16  # passes that probes are read in, or left out, at a stretch: what they gain comes some passes later
MEMORY = 0.97  # weight that a pass keeps at each later one of its arm


@dataclass
class _Arm:
    tokens: float = 0.0
    seconds: float = 0.0

    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Probing:
    """Passes with and without probes, compared by tokens per second; now and then the worse way is tried again."""

    on: bool = False
    _left: int = 0  # passes of the stretch under way
    _arms: tuple[_Arm, _Arm] = field(default_factory=lambda: (_Arm(), _Arm()))  # without, with
    _lost: float = 0.0  # seconds that tries have cost in this call

    def begin(self) -> None:
        """A new call, which allows for tries of its own."""
        self._lost = 0.0

    def decide(self, more: float, allowed: float) -> bool:
        """Whether the next pass reads the probes.

        more: seconds that they add to it. allowed: seconds that tries of this call may have cost by now.
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
        """What a pass gave and took."""
        arm = self._arms[self.on]
        arm.tokens = arm.tokens * MEMORY + tokens
        arm.seconds = arm.seconds * MEMORY + seconds
