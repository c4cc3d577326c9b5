"""A row's own text, in which the copying drafters find what it is saying now: references, prompt and output."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from truedraft.stores._native import Cursor
from truedraft.stores.automaton import SEPARATOR, automaton
from truedraft.tree import Row


class Told:
    """References, prompt and output of one row in an automaton, and where its last tokens stood before."""

    def __init__(self, row: Row):
        self.automaton, self.cursor, self.heard = automaton(), Cursor(), 0
        for document in row.references:
            self.automaton.read(self.cursor, (*document, SEPARATOR))

    def follow(self, row: Row) -> None:
        if self.heard < len(row.tokens):
            self.automaton.read(self.cursor, row.tokens[self.heard :] if self.heard else row.tokens)
            self.heard = len(row.tokens)

    def place(self, ahead: Sequence[int] = (), longest: int | None = None) -> Cursor:
        """Where the last tokens, and then `ahead`, stood: a cursor of the caller's own.

        longest: tokens looked for, at most.
        """
        cursor = self.cursor.copy()
        if ahead:
            self.automaton.follow(cursor, ahead)
        if longest is not None:
            self.automaton.shorten(cursor, longest)
        return cursor


_TOLD: WeakKeyDictionary[Row, Told] = WeakKeyDictionary()


def told(row: Row) -> Told:
    """The row's text as far as it goes; one, whoever drafts from it."""
    text = _TOLD.get(row)
    if text is None:
        text = _TOLD[row] = Told(row)
    text.follow(row)
    return text


def root_of(row: Row, ahead: Sequence[int]) -> int:
    return ahead[-1] if ahead else row.tokens[-1]
