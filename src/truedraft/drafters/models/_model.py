"""Base class of drafters with a draft model: its next-token distributions grow a tree, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from truedraft.card import method_name
from truedraft.drafters._base import Continuing, Drafter
from truedraft.drafters._growing import GrowingDrafter, GrowingTree
from truedraft.drafters.models._reader import Reader, loaded
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Draws, Row


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


class ChainDrafter(ModelDrafter, Continuing):
    """Drafts a chain of tokens. Fields of every subclass: length (tokens at most), confidence (a draft ends after a
    token of lower probability)."""

    length: int
    confidence: float

    @property
    def width(self) -> int:
        return self.length

    @property
    def levels(self) -> int:
        return self.length

    @property
    def draws(self) -> Draws:
        return "one"

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        (node,), (law,) = nodes, laws
        tokens = self.chosen(growing, node, law)
        sure = all(law[token] >= self.confidence for token in tokens)
        added = growing.add(node, tokens, law)
        growing.end_level(added if sure else [])

    def extend_each(
        self, rows: Sequence[Row], after: Sequence[Sequence[int]], budget: Sequence[int]
    ) -> list[DraftTree]:
        self.reader.catch_up(rows, after)
        each = zip(rows, budget, after, strict=True)
        return self._grown([self._growing(row, most, drafted) for row, most, drafted in each])


def unnamed(drafter: Drafter) -> Refused:
    """The refusal of a drafter that was given no draft model."""
    name = method_name(drafter)
    return Refused(f"{name} needs a draft model: draft='{name}:model=NAME', or accelerate(draft=MODEL)")
