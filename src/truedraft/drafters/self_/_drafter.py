"""Drafters by views: the target drafts under one, and verifies whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._confidence import ConfidenceTree
from truedraft.drafters._learned import fingerprint
from truedraft.drafters.self_._reader import ViewReader
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores
from truedraft.views._base import View


class ViewDrafter(ConfidenceTree):
    """Drafts by passes of the target under a view. Fields of every subclass: those of `ConfidenceTree`.

    view: how the target drafts.
    """

    reads_texts = False  # the target has read them
    view: View

    def __post_init__(self) -> None:
        self._reader: ViewReader | None = None
        self.forget()

    def forget(self) -> None:
        self._calibration = Calibration()

    @property
    def width(self) -> int:
        return max(self.nodes, self.depth * self.expanded + 1)  # positions behind a row that passes under a view need

    @property
    def reader(self) -> ViewReader:
        assert self._reader is not None
        return self._reader

    def bind(self, target: Target) -> None:
        self._reader = ViewReader(target)
        self.use(self.view)

    def use(self, view: View) -> None:
        """Draft by a view from now on.

        Raises:
            Refused: the target cannot run under it.
        """
        target, views = self.reader.target, [view.at(depth) for depth in range(self.depth)]
        for one in dict.fromkeys(views):
            target.check_view(one)
        self.view, self.reader.views = view, views
        self._share = sum(map(target.share, views)) / len(views)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        if self.pass_cost is not None and not self._of_level:
            self._of_level = self._share * self.pass_cost.plain  # until it is measured
        drafts = super().propose(rows, budget)
        self.reader.target.rewind()
        return drafts

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self._calibration.update(rows)

    def end(self, row: Row) -> None:
        self._calibration.end(row)


@dataclass
class SelfDrafter(ViewDrafter):
    """The drafter of a given view.

    Args:
        view: how the target drafts.

    The other fields are knobs of every view's drafter (`draft="NAME:knob=value"`), beside those of the view.
    """

    card = Card(
        paper="arXiv 2309.08168 (2023), 2406.16858 (2024)",
        idea="The target drafts for itself, run lighter.",
        family="self-drafting",
    )
    view: View
    nodes: int = knob(24, 1, 1024)  # of the draft
    depth: int = knob(24, 1, 64)  # levels at most; published 8 and 12
    top_k: int = knob(1, 1, 64)  # nodes expanded per level, and children of each
    drawn: bool = knob(False)  # a drawn chain for rejection rules

    def __post_init__(self) -> None:
        self.card = self.view.card  # type: ignore[misc]
        super().__post_init__()

    @property
    def name(self) -> str:
        """Its name in reports: the view's."""
        return self.view.name

    def bind(self, target: Target) -> None:
        super().bind(target)
        if (found := self.view.fingerprint) is not None and found != (given := fingerprint(target.model)):
            raise Refused(f"{self.name} was calibrated on another model ({found}; this is {given}): calibrate it again")
