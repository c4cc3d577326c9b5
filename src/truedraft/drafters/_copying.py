"""Furniture of drafters that copy: from where the last tokens stood before, and from what earlier rows said."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from truedraft.drafters._base import PerRow
from truedraft.drafters._texts import RowText, root_of, told
from truedraft.drafters._trees import copied
from truedraft.stores.memory import Memory, Places
from truedraft.tree import DraftTree, Row


class InText(PerRow[RowText]):
    """Drafts chains by what stands in references, prompt and output.

    Fields that every subclass has: length, tokens drafted.
    """

    takes_references = True
    length: int

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> RowText:
        return told(row, self.pass_cost)


class Copying(InText):
    """Copies from one place of the text."""

    @property
    @abstractmethod
    def span(self) -> tuple[int, int]:
        """Tokens of the shortest and the longest suffix that is looked for; what first followed it is copied."""

    def draft(self, row: Row, state: RowText, ahead: Sequence[int], budget: int) -> DraftTree:
        state.follow(row)
        shortest, longest = self.span
        text, place = state.place(ahead, longest)
        tokens = text.copy(place, shortest, min(self.length, budget))
        return copied(root_of(row, ahead), tokens, place.length)


class Remembering(PerRow[tuple[RowText, Places]]):
    """Looks in the row's own text and in what earlier rows of its namespace said.

    Fields that every subclass has: memory, tokens of earlier outputs that are kept.
    """

    takes_references = True
    memory: int

    def forget(self) -> None:
        super().forget()
        self._said = Memory(self.memory)

    def memories(self) -> Sequence[Memory]:
        return (self._said,)

    def begin(self, row: Row) -> tuple[RowText, Places]:
        return told(row, self.pass_cost), Places()

    def finish(self, row: Row, state: tuple[RowText, Places]) -> None:
        self._said.add(row.namespace, row.tokens[row.prompt : row.end])
