"""Base class of drafters with corpora: opens them, and checks that they fit the target and its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft.drafters._base import Drafter
from truedraft.stores.corpus import Corpus, corpora
from truedraft.targets._base import Target


class HasCorpora(Drafter):
    """A drafter with the knob `corpus`: none, one or several (`stores.corpus.corpora`)."""

    corpus: Any

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        self.corpora: Sequence[Corpus] = corpora(self.corpus)

    def bind(self, target: Target) -> None:
        for corpus in self.corpora:
            corpus.check_vocabulary(target.vocabulary)
        super().bind(target)

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        for corpus in self.corpora:
            corpus.check(tokenizer)
        super().read(tokenizer)
