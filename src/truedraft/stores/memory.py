"""Texts of earlier rows, from which later rows of the same namespace draft; bounded, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Generic, TypeVar

import numpy as np

from truedraft.errors import Refused
from truedraft.stores import _file
from truedraft.stores._cursor import SEPARATOR, Cursor
from truedraft.stores.automaton import Automaton, automaton
from truedraft.stores.corpus import fingerprint

T = TypeVar("T")
KIND, VERSION = "memory", 2
SHARES = 4  # parts into which the limit is divided; the oldest is forgotten as a whole
LEAST = 64  # tokens that a part counts as, at least: even an empty one needs that much memory
RECENT = 64  # tokens of context that a new cursor reads
BYTES = 1 << 29  # that a drafter's state of all namespaces may have


class Memory:
    """Texts by namespace, in automata in which later rows of the namespace look up continuations.

    When all texts together have more than `limit` tokens, the part begun first is forgotten: a part has up to a
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

    def save(self, path: str | PathLike[str], tokenizer: Any = None) -> None:
        """Write all texts with their namespaces, whole or not at all.

        tokenizer: of these tokens; `load` refuses the file for a model with another one.

        Raises:
            OSError: it cannot be written; an earlier file of that name is kept.
        """
        texts = [np.array(part.text, np.int32) for _, part in self._parts]
        config = {
            "namespaces": [name for name, _ in self._parts],
            "lengths": [len(text) for text in texts],
            "fingerprint": "" if tokenizer is None else fingerprint(tokenizer),
        }
        _file.write(path, KIND, VERSION, config, {"token": np.concatenate([np.zeros(0, np.int32), *texts])})

    def load(self, path: str | PathLike[str], tokenizer: Any, vocabulary: int) -> None:
        """Add the texts of a file to their namespaces, as if they had just been emitted.

        Raises:
            Refused: there is none, or it is damaged, of another version or another tokenizer's; nothing was added.
        """
        config, arrays, _ = _file.read(path, KIND, VERSION, "save_memory")
        try:
            texts = _texts(config, arrays["token"])
        except (KeyError, TypeError, ValueError) as e:
            raise Refused(f"memory {str(path)!r} is damaged ({e}): save one again") from e
        if config["fingerprint"] and tokenizer is not None and config["fingerprint"] != fingerprint(tokenizer):
            raise Refused(f"memory {str(path)!r} was saved with another tokenizer: save one with this model's")
        tokens = arrays["token"]
        if len(tokens) and not SEPARATOR <= tokens.min() <= tokens.max() < vocabulary:
            raise Refused(
                f"memory {str(path)!r} holds token {tokens.max()}, and the model has {vocabulary}: save another"
            )
        for name, text in texts:
            self._add_all(name, text)

    def copy(self, other: Memory) -> None:
        """Add the texts of another memory to their namespaces, as if they had just been emitted."""
        for name, part in list(other._parts):
            self._add_all(name, np.array(part.text, np.int32))

    def _add_all(self, name: str, text: Any) -> None:
        for document in np.split(text, np.flatnonzero(text == SEPARATOR) + 1):
            if len(document) > 1:
                self.add(name, document[document != SEPARATOR].tolist())


def _texts(config: Mapping[str, Any], tokens: Any) -> list[tuple[str, Any]]:
    """Namespace and tokens of each text of a file.

    Raises:
        KeyError, TypeError, ValueError: the description does not fit the tokens.
    """
    names, lengths, mark = config["namespaces"], config["lengths"], config["fingerprint"]
    if tokens.ndim != 1 or tokens.dtype != np.int32 or not all(isinstance(text, str) for text in (mark, *names)):
        raise ValueError("its texts are of other kinds")
    if not all(isinstance(length, int) and length >= 0 for length in lengths) or sum(lengths) != len(tokens):
        raise ValueError("its texts have other lengths")
    return list(zip(names, np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else [], strict=True))


def _count(part: Automaton) -> int:
    return max(len(part), LEAST)


class Tenants(Generic[T]):
    """State of a drafter by namespace, for the `limit` namespaces last used, and for fewer where they would have more
    than `BYTES`; the least recently used is forgotten, that in use never.

    Args:
        make: makes the state of a new namespace.
        nbytes: bytes of a state, approximately; states grow as they are used.
    """

    def __init__(self, limit: int, make: Callable[[], T], nbytes: Callable[[T], int] = lambda state: 0):
        self.limit, self._make, self._nbytes = limit, make, nbytes
        self._by_namespace: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_namespace)

    def of(self, namespace: str) -> T:
        if namespace not in self._by_namespace:
            self._by_namespace[namespace] = self._make()
        self._by_namespace.move_to_end(namespace)
        while len(self) > 1 and (len(self) > self.limit or sum(map(self._nbytes, self._by_namespace.values())) > BYTES):
            self._by_namespace.popitem(last=False)
        return self._by_namespace[namespace]


class Places:
    """The positions of a row's last tokens in other texts: a cursor for each automaton that the row may read."""

    def __init__(self) -> None:
        self._cursors: list[tuple[Automaton, Cursor]] = []
        self._followed = 0

    def follow(self, automata: Sequence[Automaton], tokens: Sequence[int]) -> list[tuple[Automaton, Cursor]]:
        """The cursors of a row whose tokens, from the first on, are `tokens`: one for each of `automata`."""
        cursors, new = {id(a): c for a, c in self._cursors}, tokens[self._followed :]
        found = []
        for text in automata:
            cursor = cursors.get(id(text))
            if cursor is None:
                cursor = Cursor()
                text.follow(cursor, tokens[-RECENT:])
            elif new:
                text.follow(cursor, new)
            found.append((text, cursor))
        self._cursors, self._followed = found, len(tokens)
        return found

    def following(
        self, automata: Sequence[Automaton], tokens: Sequence[int], after: Sequence[int]
    ) -> list[tuple[Automaton, Cursor]]:
        """As `follow`, moved on along the drafted tokens `after`: copies of the cursors."""
        found = [(text, cursor.copy()) for text, cursor in self.follow(automata, tokens)]
        for text, cursor in found if after else ():
            text.follow(cursor, after)
        return found
