"""What earlier rows said, for later rows of the same namespace; bounded, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from truedraft.stores._native import Cursor
from truedraft.stores.automaton import SEPARATOR, Automaton, automaton

T = TypeVar("T")
SHARES = 4  # parts that the bound is divided in; the oldest is forgotten as a whole
LEAST = 64  # tokens that a part counts as, at least: it takes as much memory
RECENT = 64  # tokens that a new cursor looks back


class Memory:
    """Texts by namespace, in automata that later rows of the namespace look things up in.

    When all texts together have more than `limit` tokens, the part begun first is forgotten: a part holds up to a
    quarter of the limit, of one namespace.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._parts: deque[tuple[str, Automaton]] = deque()  # by age
        self._of: dict[str, list[Automaton]] = {}  # the same by namespace
        self._counted = 0

    def __len__(self) -> int:
        """Tokens held, of all namespaces."""
        return sum(len(part) for _, part in self._parts)

    def add(self, namespace: str, text: Sequence[int]) -> None:
        share = max(self.limit // SHARES, 1)
        text = [*text[-share:], SEPARATOR]
        mine = self._of.setdefault(namespace, [])
        if not mine or len(mine[-1]) + len(text) > share:
            mine.append(automaton())
            self._parts.append((namespace, mine[-1]))
            self._counted += LEAST
        self._counted -= _count(mine[-1])
        mine[-1].extend(text)
        self._counted += _count(mine[-1])
        while len(self._parts) > 1 and self._counted > self.limit:
            self._forget()

    def _forget(self) -> None:
        name, part = self._parts.popleft()
        self._counted -= _count(part)
        del self._of[name][0]
        if not self._of[name]:
            del self._of[name]

    def of(self, namespace: str) -> Sequence[Automaton]:
        """The parts that a row of this namespace may read."""
        return self._of.get(namespace, ())


def _count(part: Automaton) -> int:
    return max(len(part), LEAST)


class Tenants(Generic[T]):
    """What is learnt by namespace, of the `limit` namespaces last used; the one longest unused is forgotten."""

    def __init__(self, limit: int, make: Callable[[], T]):
        self.limit, self._make = limit, make
        self._known: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, namespace: str) -> T:
        if namespace not in self._known:
            self._known[namespace] = self._make()
        self._known.move_to_end(namespace)
        while len(self._known) > self.limit:
            self._known.popitem(last=False)
        return self._known[namespace]


class Places:
    """Where a row's last tokens stand in texts of others: a cursor for each automaton that it may read."""

    def __init__(self) -> None:
        self._cursors: list[tuple[Automaton, Cursor]] = []
        self._heard = 0

    def follow(self, automata: Sequence[Automaton], tokens: Sequence[int]) -> list[tuple[Automaton, Cursor]]:
        """The row has said `tokens`, all of them; returns its cursors, one for each of `automata`."""
        known, new = {id(a): c for a, c in self._cursors}, tokens[self._heard :]
        found = []
        for text in automata:
            cursor = known.get(id(text))
            if cursor is None:
                cursor = Cursor()
                text.follow(cursor, tokens[-RECENT:])
            elif new:
                text.follow(cursor, new)
            found.append((text, cursor))
        self._cursors, self._heard = found, len(tokens)
        return found

    def ahead(
        self, automata: Sequence[Automaton], tokens: Sequence[int], ahead: Sequence[int]
    ) -> list[tuple[Automaton, Cursor]]:
        """As `follow`, and where `ahead` leads from there: cursors of the caller's own."""
        found = [(text, cursor.copy()) for text, cursor in self.follow(automata, tokens)]
        for text, cursor in found if ahead else ():
            text.follow(cursor, ahead)
        return found
