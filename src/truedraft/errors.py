"""What is refused, and what an interruption leaves."""

from __future__ import annotations

from typing import Any


class Refused(ValueError):
    """A setting that cannot be honoured exactly; the message names the argument, its value and the remedy."""


class NoRoom(Refused):
    """There is not the memory for so many rows or positions."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while tokens were decoded.

    output: what `generate` would have returned, cut behind the last pass that was completed.
    report: the figures until then; `interrupted` is true in it.
    """

    def __init__(self, output: Any, report: Any):
        super().__init__("generation was interrupted; what had been generated is the exception's output")
        self.output, self.report = output, report
