"""The texts that a row may copy from: its own and the references, indexed by suffix automata."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from truedraft.drafters._base import PassCost
from truedraft.stores._cursor import Cursor, Place, Search
from truedraft.stores.automaton import Automaton, automaton
from truedraft.stores.memory import Places
from truedraft.stores.references import References
from truedraft.tree import Row

LONG = 4  # tokens of a match that is not just a common phrase
READING = 0.05  # share of plain decoding's time spent on indexing references: at the start, and in each later pass


class RowText:
    """Prompt and output of one row in an automaton, the row's references, and the current match in both.

    pass_cost: cost of the target's passes; None where the time of indexing is not bounded.
    given: the references, None where there are none.
    growing: whether the latest tokens made the current match longer than it was, and LONG at least.
    """

    def __init__(self, row: Row, pass_cost: PassCost | None):
        self.automaton, self.cursor, self.followed = automaton(), Cursor(), 0
        self.growing, self._matched = False, 0
        self._pace = None if pass_cost is None else READING * pass_cost.plain
        self.given: References | None = None
        if row.references:
            self.given = row.references if isinstance(row.references, References) else References(row.references)
            self.given.read(None if self._pace is None else self._pace * row.room)
            self._places = Places()

    def follow(self, row: Row) -> None:
        if self.followed == len(row.tokens):
            return
        before = self._matched
        self.automaton.read(self.cursor, row.tokens[self.followed :] if self.followed else row.tokens)
        if self.given is not None:
            if self.followed:
                self.given.read(self._pace)
            ((_, self._there),) = self._places.follow([self.given.automaton], row.tokens)
        self._matched = max(self.cursor.length, 0 if self.given is None else self._there.length)
        self.growing = self._matched > before and self._matched >= LONG
        self.followed = len(row.tokens)

    def grows(self, row: Row) -> bool:
        """Whether the current match grew with the latest tokens of a row, and is LONG."""
        self.follow(row)
        return self.growing

    def places(self, after: Sequence[int] = (), longest: int | None = None) -> list[tuple[Automaton, Cursor]]:
        """The match of the last tokens, followed by `after`, in the references, if there are any, and in the own text.

        The cursors are copies.

        longest: most tokens of a match.
        """
        found = [(self.automaton, self.cursor.copy())]
        if self.given is not None:
            found.insert(0, (self.given.automaton, self._there.copy()))
        for text, cursor in found:
            if after:
                text.follow(cursor, after)
            if longest is not None:
                text.shorten(cursor, longest)
        return found

    def locate(self, place: Place, source: int, tokens: Sequence[int], added: int, search: Search) -> None:
        """Move a place in the first `source` tokens of the references, or else of the own text, along the last `added`
        tokens of the row, which it has followed."""
        recent = tokens[max(len(tokens) - added - search.context + 1, 0) :]
        if self.given is None:
            self.automaton.locate(self.cursor, place, source, recent, added, search)
        else:
            self.given.automaton.locate(self._there, place, source, recent, added, search)

    def place(self, after: Sequence[int] = (), longest: int | None = None) -> tuple[Automaton, Cursor]:
        """The longer match of `places`; of equal ones that in the references."""
        return max(self.places(after, longest), key=lambda place: place[1].length)


_ROW_TEXTS: WeakKeyDictionary[Row, RowText] = WeakKeyDictionary()


def row_text(row: Row, pass_cost: PassCost | None) -> RowText:
    """The row's `RowText`, up to its last token; one per row, shared by all drafters."""
    text = _ROW_TEXTS.get(row)
    if text is None:
        text = _ROW_TEXTS[row] = RowText(row, pass_cost)
    text.follow(row)
    return text
