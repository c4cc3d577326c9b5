"""Base class of drafters that search corpora: opens them, and checks that they fit the target and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft.drafters._base import PerRow, State
from truedraft.stores._cursor import Cursor
from truedraft.stores.automaton import Automaton
from truedraft.stores.corpus import Corpus, corpora
from truedraft.stores.memory import Places
from truedraft.targets._base import Target
from truedraft.tree import Row


class WithCorpora(PerRow[State]):
    """A drafter with the knob `corpus`: none, one or several (`stores.corpus.corpora`); all of them are searched."""

    corpus: Any

    def __post_init__(self) -> None:
        super().__post_init__()
        self.corpora: Sequence[Corpus] = corpora(self.corpus)

    def bind(self, target: Target) -> None:
        for corpus in self.corpora:
            corpus.check_vocabulary(target.vocabulary)

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        for corpus in self.corpora:
            corpus.check(tokenizer)

    def found(self, places: Places, row: Row, after: Sequence[int]) -> list[tuple[Automaton, Cursor]]:
        """The match of the row's last tokens, followed by `after`, in each corpus; the cursors are copies."""
        return places.following([corpus.automaton for corpus in self.corpora], row.tokens, after)
