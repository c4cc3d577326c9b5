"""Documents that an output may copy from, tokenised in small steps: a megabyte takes longer than short calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from transformers import PreTrainedTokenizerBase

from truedraft.stores._cursor import SEPARATOR
from truedraft.stores.automaton import automaton

PIECE = 2048  # characters read at a time; of token ids a quarter
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A document that is tokenised as it is read.

    vocabulary: size of the model's vocabulary; tokens beyond it are never drafted.
    """

    text: str
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int

    def pieces(self) -> Iterator[Sequence[int]]:
        """Its tokens, in pieces that end at line ends where there are any."""
        at = 0
        while at < len(self.text):
            end = at + PIECE
            if end < len(self.text) and (line := self.text.rfind("\n", at, end)) > at:
                end = line + 1
            tokens = self.tokenizer(self.text[at:end], add_special_tokens=False)["input_ids"]
            yield [token if token < self.vocabulary else SEPARATOR for token in tokens]
            at = end


class References(Sequence[Tokens]):
    """Documents, one object for all rows that share them. As a sequence it is the complete tokens of each.

    Args:
        documents: each text or token ids.

    Attributes:
        tokens: those read so far, of all documents, each followed by a SEPARATOR.
        automaton: over these tokens.
    """

    def __init__(self, documents: Sequence[Text | Tokens]):
        self.documents = documents
        self.tokens: list[int] = []
        self.automaton = automaton()
        self._ends: list[int] = []  # of the documents read
        self._unread: Iterator[Sequence[int]] | None = self._pieces()
        self._seconds = 0.0  # that may still be spent

    def _pieces(self) -> Iterator[Sequence[int]]:
        for document in self.documents:
            if isinstance(document, Text):
                yield from document.pieces()
            else:
                yield from (document[at : at + PIECE // 4] for at in range(0, len(document), PIECE // 4))
            self._ends.append(len(self.tokens))
            yield (SEPARATOR,)

    def read(self, seconds: float | None = None) -> None:
        """Read on, with about this many seconds added to the time granted before; by default to the end."""
        if self._unread is None:
            return
        self._seconds += float("inf") if seconds is None else seconds
        began = time.perf_counter()
        while time.perf_counter() - began < self._seconds:
            piece = next(self._unread, None)
            if piece is None:
                self._unread = None
                return
            self.tokens += piece
            self.automaton.extend(piece)
        self._seconds -= time.perf_counter() - began

    def __len__(self) -> int:
        return len(self.documents)

    @overload
    def __getitem__(self, index: int) -> Tokens: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tokens]: ...
    def __getitem__(self, index: int | slice) -> Tokens | Sequence[Tokens]:
        self.read()
        starts = [0, *(end + 1 for end in self._ends)]
        whole = [tuple(self.tokens[start:end]) for start, end in zip(starts, self._ends, strict=False)]
        return whole[index]
