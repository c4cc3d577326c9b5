"""Base class of drafters that search corpora."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.drafters._base import PerRow, State
from truedraft.drafters._corpora import HasCorpora
from truedraft.stores._cursor import Cursor
from truedraft.stores.automaton import Automaton
from truedraft.stores.memory import Places
from truedraft.tree import Row


class WithCorpora(HasCorpora, PerRow[State]):
    """A drafter that searches all of its corpora."""

    def found(self, places: Places, row: Row, after: Sequence[int]) -> list[tuple[Automaton, Cursor]]:
        """The match of the row's last tokens, followed by `after`, in each corpus; the cursors are copies."""
        return places.following([corpus.automaton for corpus in self.corpora], row.tokens, after)
