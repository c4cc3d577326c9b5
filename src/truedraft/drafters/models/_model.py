"""Base class of drafters with a draft model: its next-token distributions grow a tree, level by level."""

from __future__ import annotations

from typing import Any

from truedraft.card import method_name
from truedraft.drafters._base import Drafter
from truedraft.drafters._growing import GrowingDrafter
from truedraft.drafters.models._reader import Reader, loaded
from truedraft.errors import Refused
from truedraft.targets._base import Target


class ModelDrafter(GrowingDrafter):
    """A drafter with a smaller model that shares the target's tokenizer.

    A subclass defines how drafts grow from that model's distributions. Each level of a draft is one pass of the draft
    model over all rows; it reads the tokens emitted since the last pass and the nodes of the previous level. Rejected
    tokens of the last draft are cropped from its cache.

    Fields of every subclass: model (a model of transformers, or the name of one: a folder, an embedded model, one on
    the hub).
    """

    model: Any

    def __post_init__(self) -> None:
        self.model, self.tokenizer = loaded(self.model)
        self._reader = Reader(self.model)

    @property
    def reader(self) -> Reader:
        return self._reader

    @property
    def vocab_size(self) -> int | None:
        return None if self.model is None else self._reader.vocab_size

    def bind(self, target: Target) -> None:
        if self.model is None:
            raise unnamed(self)
        self._reader.fit(target)


def unnamed(drafter: Drafter) -> Refused:
    """The refusal of a drafter that was given no draft model."""
    name = method_name(drafter)
    return Refused(f"{name} needs a draft model: draft='{name}:model=NAME', or accelerate(draft=MODEL)")
