"""The drafter of any view: the target drafts under it, and verifies whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._views import ViewReader, ViewTree
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores
from truedraft.views._base import View


@dataclass
class SelfDrafter(ViewTree):
    """Drafts by passes of the target under a view.

    Args:
        view: how the target drafts.

    The other fields are knobs of every view's drafter (`draft="NAME:knob=value"`), beside those of the view.
    """

    card = Card(
        paper="arXiv 2309.08168 (2023), 2406.16858 (2024)",
        idea="The target drafts for itself, run lighter.",
        family="self-drafting",
    )
    reads_texts = False  # the target has read them
    view: View
    nodes: int = knob(24, 1, 1024)  # of the draft
    depth: int = knob(24, 1, 64)  # levels at most; published 8 and 12, SWIFT 25
    top_k: int = knob(1, 1, 64)  # nodes expanded per level, and children of each; SWIFT up to 10 children of one
    drawn: bool = knob(False)  # a drawn chain for rejection rules

    def __post_init__(self) -> None:
        self.card = self.view.card  # type: ignore[misc]
        self._reader: ViewReader | None = None
        self.forget()

    def forget(self) -> None:
        self._calibration = Calibration()

    @property
    def name(self) -> str:
        """Its name in reports: the view's."""
        return self.view.name

    @property
    def reader(self) -> ViewReader:
        assert self._reader is not None
        return self._reader

    def bind(self, target: Target) -> None:
        self._reader = self.run_under(target, [self.view.at(depth) for depth in range(self.depth)])

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self._calibration.update(rows)

    def end(self, row: Row) -> None:
        self._calibration.end(row)
