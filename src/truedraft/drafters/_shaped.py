"""Base class of drafters that shape trees: they grow from the distributions of a draft model or of another drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft import registry
from truedraft.card import method_name, shown
from truedraft.drafters._candidates import DraftVocabulary
from truedraft.drafters._growing import GrowingDrafter
from truedraft.drafters.models._model import unnamed
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps


class ShapedDrafter(GrowingDrafter):
    """A drafter of trees that grow from the distributions of a draft model, or of a learned head such as EAGLE's.

    A subclass defines how they grow from these (`grow`). Each level is one pass of that model or head over all rows.

    Fields of every subclass: model (a draft model, as of `draft-model`), source (a drafter whose distributions are
    used in its place, or its name with its knobs).
    """

    model: Any
    source: Any

    def __post_init__(self) -> None:
        name, source = method_name(self), self.source
        if self.model is not None and source is not None:
            raise Refused(f"{name} has both model={shown(self.model)} and source={shown(source)}: give one of them")
        if isinstance(source, str):
            source = registry.load("drafters", source)
        found = registry.load("drafters", "draft-model", model=self.model) if source is None else source
        if not isinstance(found, GrowingDrafter) or not found.any_shape:
            raise Refused(
                f"{name}:source={shown(self.source)}: its distributions are not those of any node of a tree: give a "
                "draft model (model=), or a head such as eagle, eagle2 or eagle3"
            )
        self.distributions: GrowingDrafter = found
        self.parts = (found,)

    def bind(self, target: Target) -> None:
        if self.source is None and self.model is None:
            raise unnamed(self, f"a learned head: '{method_name(self)}:source=eagle3'")
        self.distributions.bind(target)

    @property
    def reader(self) -> Any:
        return self.distributions.reader

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.distributions.vocabulary

    @property
    def shared(self) -> Mapping[int, int] | None:  # type: ignore[override]
        return self.distributions.shared

    @property
    def needs(self) -> Taps:  # type: ignore[override]
        return self.distributions.needs

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:  # type: ignore[override]
        return self.distributions.tokenizer

    @property
    def own_tokens(self) -> frozenset[int]:  # type: ignore[override]
        return self.distributions.own_tokens

    @property
    def vocab_size(self) -> int | None:
        return self.distributions.vocab_size

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *self.distributions.notes]

    def translate(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().translate(tokenizer)
        self.distributions.translate(tokenizer)

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.distributions.read(tokenizer)

    def open(self) -> None:
        self.distributions.open()

    def unread(self, row: Row, after: Sequence[int], read: int) -> list[int]:
        return self.distributions.unread(row, after, read)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self.distributions.observe(rows, trees, scores, accepted)

    def end(self, row: Row) -> None:
        self.distributions.end(row)

    def forget(self) -> None:
        self.distributions.forget()


class NodeBudget(ShapedDrafter):
    """Trees of so many nodes and levels at most. Fields of every subclass: nodes, length (levels)."""

    nodes: int
    length: int

    @property
    def width(self) -> int:
        return self.nodes

    @property
    def levels(self) -> int:
        return self.length
