"""The contract of controls: how much to draft, and how much of the draft to verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import ClassVar

from truedraft.card import Card
from truedraft.drafters._base import Drafter
from truedraft.errors import Refused
from truedraft.stats import PassTimes
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row


class Control(ABC):
    """Sizes the drafts of all rows of a running batch together. It affects the speed of decoding, never its output.

    times: seconds spent so far by part, updated by the `Stopwatch` of the engine; without one they stay constant.
    drafting: the seconds in `times.draft`, by the `id` of the drafter.
    """

    card: ClassVar[Card]
    times: PassTimes = PassTimes()
    drafting: Mapping[int, float] = {}

    def another(self) -> Control:
        """A control with the same knobs and no observations.

        Raises:
            Refused: it is no dataclass, as controls are.
        """
        if not is_dataclass(self):
            raise Refused(f"control={self!r} is no dataclass, so an engine cannot copy its knobs: decorate its class")
        return replace(self)

    def open(self, target: Target, drafter: Drafter, rows: int, lockstep: bool, steps: int) -> None:
        """Called before the first rows of a drafter in a call, or in an engine in which it has none.

        rows: how many they are.
        lockstep: whether its rows advance together, so that a token counts only where every row accepts it.
        steps: most tokens that one of its rows may emit.
        """

    def start(self, rows: Sequence[Row]) -> None:
        """Admit rows; each is drafted for by `row.request.drafter`."""

    @abstractmethod
    def budget(self, rows: Sequence[Row]) -> list[int]:
        """Most nodes to draft below each row's root; `rows` are all running rows."""

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The parts of the drafts to verify; `rows` as in `budget`."""
        return list(trees)

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """The outcome of the pass; `row.tokens` already contains the emitted tokens."""

    def end(self, row: Row) -> None:
        """Remove a finished row. It may have been removed before, or not have been started; see `Drafter.end`."""
