"""The suffix automaton in Python, used where there is no compiled one; `automaton.c` explains the method."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from truedraft.stores._cursor import CAP, MOST, Best, Cursor, Grown, Place, Search, Sizes


class PythonAutomaton:
    """As `automaton.CompiledAutomaton`; about ten times slower, and larger in memory."""

    def __init__(self, cap: int = CAP):
        self.cap = cap
        self.text: list[int] = []
        self.link, self.len, self.end, self.last, self.count = [0], [0], [0], [0], [0]
        self.next: list[dict[int, int]] = [{}]
        self.tail = self.active = self.depth = 0

    def __len__(self) -> int:
        return len(self.text)

    @property
    def nbytes(self) -> int:
        return 400 * len(self.link)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._extend(token)

    def read(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        for token in tokens:
            if cursor.has_pending:
                self._extend(cursor.pending)
            self._step(cursor, token)
            cursor.pending, cursor.has_pending = token, 1

    def follow(self, cursor: Cursor, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._step(cursor, token)

    def shorten(self, cursor: Cursor, length: int) -> None:
        cursor.length = min(length, cursor.length)
        cursor.state = self._holding(cursor.state, cursor.length)

    def copy(self, cursor: Cursor, shortest: int, count: int, enough: int = 1, latest: bool = False) -> list[int]:
        text, places = self.text, self.last if latest else self.end
        self.shorten(cursor, cursor.length)
        while cursor.state and cursor.length >= shortest:
            start = places[cursor.state] + 1
            found = text[start : start + count]
            if cursor.has_pending and len(found) < count and start <= len(text):
                found.append(cursor.pending)
            stop = next((i for i, token in enumerate(found) if token < 0), len(found))
            if stop >= enough:
                return found[:stop]
            cursor.state = self.link[cursor.state]
            cursor.length = self.len[cursor.state]
        return []

    def first(self, cursor: Cursor) -> int:
        return self.end[self._holding(cursor.state, cursor.length)]

    def grow(self, cursor: Cursor, nodes: int, rarest: int = 1, wide: int = 8, deep: int = CAP) -> Grown:
        grown = Grown([], [], [])
        depths: list[int] = []
        heap: list[tuple[int, int, int, int, int]] = []
        state, node, made = self._holding(cursor.state, cursor.length), -1, 0
        while True:
            if (depths[node] if node >= 0 else 0) < deep:
                below = [(t, s) for t, s in self.next[state].items() if t >= 0 and self.count[s] >= max(rarest, 1)]
                for token, child in heapq.nlargest(wide, below, key=lambda ts: self.count[ts[1]]):
                    made += 1
                    heapq.heappush(heap, (-self.count[child], made, child, node, token))
            if not heap or len(depths) == min(nodes, MOST):
                return grown
            count, _, state, parent, token = heapq.heappop(heap)
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
            node = len(grown.tokens)
            for values, value in zip(grown, (token, parent, -count), strict=True):
                values.append(value)

    def best(self, cursor: Cursor, sizes: Sizes, score: float = 0.0) -> Best | None:
        found: Best | None = None
        for length, count in self.suffixes(cursor):
            most = sizes.alpha * length + sizes.offset
            if most <= score:
                break
            here = cursor.copy()
            self.shorten(here, length)
            nodes, rarest = min(int(most), sizes.nodes), math.ceil(sizes.rare * count)
            grown = self.grow(here, nodes, rarest, sizes.wide, sizes.deep - length)
            if (expected := sum(grown.counts) / count) > score:
                found, score = Best(grown, expected, length, count), expected
        if found is not None:
            self.shorten(cursor, found.length)
        return found

    def suffixes(self, cursor: Cursor) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        length = cursor.length
        state = self._holding(cursor.state, length)
        while state and len(found) < CAP:
            found.append((length, self.count[state]))
            state = self.link[state]
            length = self.len[state]
        return found

    def locate(
        self, cursor: Cursor, place: Place, source: int, tokens: Sequence[int], added: int, search: Search
    ) -> None:  # fmt: skip
        text = self.text if len(self.text) >= source else [*self.text, cursor.pending]
        for end in range(len(tokens) - added + 1, len(tokens) + 1):
            if place.at < 0:
                break
            if place.at < source and text[place.at] == tokens[end - 1]:
                place.at, place.run = place.at + 1, 1 if place.wrong else place.run + 1
                place.wrong = 0
            else:
                _depart(text[:source], place, tokens[max(end - search.context, 0) : end], search)
        if place.at >= 0 and not place.wrong:
            return
        here = cursor.copy()
        self.shorten(here, search.context)
        for length, _ in self.suffixes(here):
            if length < (search.shortest if place.at < 0 else search.afar):
                return
            self.shorten(here, length)
            if (end := self.first(here)) + 1 < source:
                place.at, place.run, place.wrong = end + 1, length, 0
                return

    def arrays(self) -> dict[str, Any]:
        return {"token": np.array(self.text, dtype=np.int32)}

    def _holding(self, state: int, length: int) -> int:
        while state and self.len[self.link[state]] >= length:
            state = self.link[state]
        return state

    def _state(self, link: int, length: int, end: int, last: int, count: int, below: dict[int, int]) -> int:
        for values, value in zip(
            (self.link, self.len, self.end, self.last, self.count), (link, length, end, last, count), strict=True
        ):
            values.append(value)
        self.next.append(below)
        return len(self.next) - 1

    def _extend(self, token: int) -> None:
        at = len(self.text)
        own = self._state(0, at + 1, at, at, 1, {})
        p = self.tail
        while token not in self.next[p]:
            self.next[p][token] = own
            if not p:
                break
            p = self.link[p]
        else:
            q = self.next[p][token]
            self.link[own] = q if self.len[q] == self.len[p] + 1 else self._split(p, token, q)
        self.text.append(token)
        self.tail = own
        self.count[0] += 1
        before = self._holding(self.active, self.depth)
        self.depth = min(self.depth + 1, self.cap)
        self.active = state = self._holding(self.next[before][token], self.depth)
        while state:
            if state != own:
                self.count[state] += 1
                self.last[state] = at
            state = self.link[state]

    def _split(self, p: int, token: int, q: int) -> int:
        clone = self._state(
            self.link[q], self.len[p] + 1, self.end[q], self.last[q], self.count[q], dict(self.next[q])
        )  # fmt: skip
        while self.next[p].get(token) == q:
            self.next[p][token] = clone
            if not p:
                break
            p = self.link[p]
        self.link[q] = clone
        return clone

    def _step(self, cursor: Cursor, token: int) -> None:
        state = self._holding(cursor.state, cursor.length)
        while token not in self.next[state] and state:
            state = self.link[state]
            cursor.length = self.len[state]
        cursor.state = self.next[state].get(token, 0)
        cursor.length = cursor.length + 1 if cursor.state else 0


def _depart(source: Sequence[int], place: Place, last: Sequence[int], search: Search) -> None:
    """After a departure from the input: take the best match nearby, or assume that one token was replaced. A match
    scores 2 for each token less log2(1 + distance)."""
    at, best, found, matched = place.at, search.replaced, None, 0
    for end in range(max(at - search.reach, 1), min(at + search.reach, len(source)) + 1):
        length = 0
        while length < min(len(last), end) and source[end - 1 - length] == last[-1 - length]:
            length += 1
        score = 2 * length - math.log2(1 + abs(end - at))
        if length and score > best:
            best, found, matched = score, end, length
    if found is not None:
        place.at, place.run, place.wrong = found, matched, 0
    elif place.run or place.wrong:
        place.at, place.run, place.wrong = at + 1, 0, place.wrong + 1
        if place.wrong > search.patience:
            place.at = -1
    else:
        place.at = -1
