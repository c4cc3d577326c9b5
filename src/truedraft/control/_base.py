"""What a control is: how much to draft, and how much of the draft to verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from truedraft.card import Card
from truedraft.drafters._base import Drafter
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row


class Control(ABC):
    """Sizes drafts. It can only make decoding faster or slower, never different.

    beside: nodes of the pass that are of other drafters' rows; of a pass that is not made yet, these rows.
    """

    card: ClassVar[Card]
    beside: int = 0

    def another(self) -> Control:
        """One with the same knobs that has learnt nothing yet."""
        return replace(self)  # type: ignore[type-var]

    def open(self, target: Target, drafter: Drafter, seconds: Mapping[str, float], lockstep: bool, steps: int) -> None:
        """Before the first pass of a call.

        seconds: spent so far by part (prefill, draft, observe, control, target), kept current.
        lockstep: rows advance together, so a token counts only where every row accepts it.
        steps: tokens that a row may emit, at most.
        """

    def start(self, rows: Sequence[Row]) -> None:
        """New rows."""

    @abstractmethod
    def budget(self, rows: Sequence[Row]) -> list[int]:
        """Nodes worth drafting below each row's root."""

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        """What of the drafts is worth verifying."""
        return list(trees)

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """What came of the pass; `row.tokens` already holds it."""

    def end(self, row: Row) -> None:
        """The row is finished; forget it. It may have been ended before, or not quite started; see `Drafter.end`."""
