"""What a control is: how much to draft, and how much of the draft to verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from truedraft.card import Card
from truedraft.drafters._base import Drafter
from truedraft.stats import PassTimes
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row


class Control(ABC):
    """Sizes drafts, those of all rows of a running batch together. It can only make decoding faster or slower, never
    different.

    times: seconds spent so far by part, kept current by the `Stopwatch` of the engine; without one they stand still.
    drafting: those of `times.draft`, by the `id` of the drafter.
    """

    card: ClassVar[Card]
    times: PassTimes = PassTimes()
    drafting: Mapping[int, float] = {}

    def another(self) -> Control:
        """One with the same knobs that has learnt nothing yet."""
        return replace(self)  # type: ignore[type-var]

    def open(self, target: Target, drafter: Drafter, lockstep: bool, steps: int) -> None:
        """Before the first rows of a drafter in a call, or in an engine in which it has none.

        lockstep: its rows advance together, so a token counts only where every row accepts it.
        steps: tokens that a row of it may emit, at most.
        """

    def start(self, rows: Sequence[Row]) -> None:
        """New rows; each is drafted for by `row.request.drafter`."""

    @abstractmethod
    def budget(self, rows: Sequence[Row]) -> list[int]:
        """Nodes to draft below each row's root, at most; `rows` are all that run."""

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """What of the drafts is to be verified; of the same rows."""
        return list(trees)

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """What came of the pass; `row.tokens` already holds it."""

    def end(self, row: Row) -> None:
        """The row is finished; forget it. It may have been ended before, or not quite started; see `Drafter.end`."""
