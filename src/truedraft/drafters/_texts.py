"""What a row may copy from: its own text, and the references."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from truedraft.drafters._base import PassCost
from truedraft.stores._cursor import Cursor
from truedraft.stores.automaton import Automaton, automaton
from truedraft.stores.memory import Places
from truedraft.stores.references import References
from truedraft.tree import Row

READING = 0.05  # of plain decoding's time, for reading references: as much at once, and again as passes go by


class RowText:
    """Prompt and output of one row in an automaton, and the row's references; where its last tokens stood before.

    pass_cost: what passes take; None where reading need not pay.
    given: the references, None where there are none.
    """

    def __init__(self, row: Row, pass_cost: PassCost | None):
        self.automaton, self.cursor, self.heard = automaton(), Cursor(), 0
        self._pace = None if pass_cost is None else READING * pass_cost.plain
        self.given: References | None = None
        if row.references:
            self.given = row.references if isinstance(row.references, References) else References(row.references)
            self.given.read(None if self._pace is None else self._pace * row.room)
            self._places = Places()

    def follow(self, row: Row) -> None:
        if self.heard == len(row.tokens):
            return
        self.automaton.read(self.cursor, row.tokens[self.heard :] if self.heard else row.tokens)
        if self.given is not None:
            if self.heard:
                self.given.read(self._pace)
            ((_, self._there),) = self._places.follow([self.given.automaton], row.tokens)
        self.heard = len(row.tokens)

    def places(self, ahead: Sequence[int] = (), longest: int | None = None) -> list[tuple[Automaton, Cursor]]:
        """Where the last tokens, and then `ahead`, stood in the references, if there are any, and in the own text.

        Cursors of the caller's own.

        longest: tokens looked for, at most.
        """
        found = [(self.automaton, self.cursor.copy())]
        if self.given is not None:
            found.insert(0, (self.given.automaton, self._there.copy()))
        for text, cursor in found:
            if ahead:
                text.follow(cursor, ahead)
            if longest is not None:
                text.shorten(cursor, longest)
        return found

    def place(self, ahead: Sequence[int] = (), longest: int | None = None) -> tuple[Automaton, Cursor]:
        """The longer of `places`; of equal ones that in the references."""
        return max(self.places(ahead, longest), key=lambda place: place[1].length)


_TOLD: WeakKeyDictionary[Row, RowText] = WeakKeyDictionary()


def told(row: Row, pass_cost: PassCost | None) -> RowText:
    """What the row may copy from as far as it goes; one, whoever drafts from it."""
    text = _TOLD.get(row)
    if text is None:
        text = _TOLD[row] = RowText(row, pass_cost)
    text.follow(row)
    return text


def root_of(row: Row, ahead: Sequence[int]) -> int:
    return ahead[-1] if ahead else row.tokens[-1]
