"""A row's own text, in which the copying drafters find what it is saying now: references, prompt and output."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from truedraft.stores._native import Cursor
from truedraft.stores.automaton import SEPARATOR, Grown, automaton
from truedraft.tree import DraftTree, Row


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


def copied(root: int, tokens: Sequence[int], found: int) -> DraftTree:
    """A chain copied from where the last `found` tokens stood: the longer the match, the likelier it goes on."""
    return DraftTree.chain(root, tokens, [KEEPS[min(found + i, len(KEEPS) - 1)] for i in range(len(tokens))])


def counted(root: int, grown: Grown, count: int, found: int) -> DraftTree:
    """A tree of what followed the last `found` tokens, which stood there `count` times, as often as each did."""
    depth: list[int] = []
    hopes = [1.0]
    for parent, times in zip(grown.parents, grown.counts, strict=True):
        depth.append(1 if parent < 0 else depth[parent] + 1)
        of = count if parent < 0 else grown.counts[parent]
        hopes.append(times / max(of, times) * KEEPS[min(found + depth[-1] - 1, len(KEEPS) - 1)])
    return DraftTree((root, *grown.tokens), (-1, *(p + 1 for p in grown.parents)), hopes=tuple(hopes))


KEEPS = [(n + 0.5) / (n + 3) for n in range(65)]  # a match of n tokens goes on: a first guess, set right by `Trust`
