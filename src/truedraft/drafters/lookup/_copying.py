"""Base classes of drafters that copy: from earlier occurrences of the last tokens, and from outputs of earlier rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import copied_chain, root_of
from truedraft.drafters.lookup._texts import RowText, row_text
from truedraft.stores.memory import Memory, Places
from truedraft.tree import DraftTree, Row


class CopiedChains(PerRow[RowText]):
    """Drafts chains of tokens copied from the references, the prompt and the output.

    Fields that every subclass has: length, tokens drafted.
    """

    takes_references = True
    length: int

    @property
    def width(self) -> int:
        return self.length

    def begin(self, row: Row) -> RowText:
        return row_text(row, self.pass_cost)

    def finds(self, row: Row, state: RowText) -> bool:
        return state.grows(row)


class SuffixLookup(CopiedChains):
    """Copies from a single match."""

    @property
    @abstractmethod
    def span(self) -> tuple[int, int]:
        """Lengths of the shortest and the longest suffix to match; what followed its first occurrence is copied."""

    def draft(self, row: Row, state: RowText, after: Sequence[int], budget: int) -> DraftTree:
        state.follow(row)
        shortest, longest = self.span
        automaton, cursor = state.place(after, longest)
        tokens = automaton.copy(cursor, shortest, min(self.length, budget))
        return copied_chain(root_of(row, after), tokens, cursor.length)


class WithMemory(PerRow[tuple[RowText, Places]]):
    """Searches the row's own text and the outputs of earlier rows of its namespace.

    Fields that every subclass has: memory, tokens of earlier outputs that are kept.
    """

    takes_references = True
    memory: int

    def forget(self) -> None:
        super().forget()
        self._outputs = Memory(self.memory)

    def memories(self) -> Sequence[Memory]:
        return (self._outputs,)

    def begin(self, row: Row) -> tuple[RowText, Places]:
        return row_text(row, self.pass_cost), Places()

    def finds(self, row: Row, state: tuple[RowText, Places]) -> bool:
        text, _ = state
        return text.grows(row)

    def finish(self, row: Row, state: tuple[RowText, Places]) -> None:
        self._outputs.add(row.namespace, row.tokens[row.prompt : row.end])
