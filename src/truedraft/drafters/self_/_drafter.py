"""Drafters by views: the target drafts under one, and verifies whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._views import ViewReader, ViewTree
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps
from truedraft.views._base import View

LAST = Taps((-1,))  # what the output head reads


class ViewDrafter(ViewTree):
    """Drafts by passes of the target under a view. Fields of every subclass: those of `ViewTree`.

    view: how the target drafts for rows that have no view of their own (`view_of`).
    """

    reads_texts = False  # the target has read them
    view: View

    def __post_init__(self) -> None:
        self._reader: ViewReader | None = None
        self._drafting: View | None = None  # what the reader runs under
        self.forget()

    def forget(self) -> None:
        self._calibration = Calibration()

    @property
    def reader(self) -> ViewReader:
        assert self._reader is not None
        return self._reader

    def bind(self, target: Target) -> None:
        self._reader, self._drafting = self.run_under(target, self._by_depth(self.view)), self.view

    def _by_depth(self, view: View) -> list[View]:
        return [view.at(depth) for depth in range(self.depth)]

    def view_of(self, row: Row) -> View:
        """How a row is drafted for. Rows with equal views share passes, others do not."""
        return self.view

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        by_view: dict[View, list[int]] = {}
        for i, row in enumerate(rows):
            by_view.setdefault(self.view_of(row), []).append(i)
        self._verified, drafts = len(rows), dict[int, DraftTree]()
        for view, places in by_view.items():
            self._draft_under(view)
            proposed = super().propose([rows[i] for i in places], [budget[i] for i in places])
            drafts |= zip(places, proposed, strict=True)
        return [drafts[i] for i in range(len(rows))]

    def _draft_under(self, view: View) -> None:
        if view != self._drafting:
            self._drafting, self.reader.views = view, self._by_depth(view)
            self._share = self.mean_share(self.reader.views)

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        return super().continues(growing, self._verified, active)

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
        if self.view.alternatives:
            self.needs = LAST
        self._fitting = list[str]()  # sentences on the target that the view was made for, where that is another
        super().__post_init__()

    def forget(self) -> None:
        super().forget()
        self._views: dict[int, View] = {}  # by row, where they have views of their own

    @property
    def name(self) -> str:
        """Its name in reports: the view's."""
        return self.view.name

    @property
    def notes(self) -> list[str]:
        return [*self.view.notes, *self._fitting]

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._fitting = target.fitting(self.view)
        for view in self.view.alternatives:
            self.check(target, self._by_depth(view))

    def view_of(self, row: Row) -> View:
        return self._views.get(id(row), self.view)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        super().observe(rows, trees, scores, accepted)
        for place, row in enumerate(rows if self.needs.hidden else ()):
            if id(row) not in self._views:
                self._views[id(row)] = self.view.behind(scores.features(place, (0,), self.needs.hidden)[-1])

    def end(self, row: Row) -> None:
        super().end(row)
        self._views.pop(id(row), None)
