"""Base class of drafters with a draft model: its next-token distributions grow a tree, level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.card import method_name
from truedraft.drafters._base import Continuing, Drafter
from truedraft.drafters._candidates import DraftVocabulary
from truedraft.drafters._growing import GrowingDrafter, GrowingTree
from truedraft.drafters.models._reader import Reader, loaded
from truedraft.drafters.models._vocabularies import RowTexts, SharedTexts, Vocabularies
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Draws, Row


class ModelDrafter(GrowingDrafter):
    """A drafter with a smaller model.

    Where that has another tokenizer than the target, it reads texts in its own tokens, and drafts those that both have:
    its distributions are restricted to them (token-level intersection, Timor et al., 2025, arXiv 2502.05202).

    A subclass defines how drafts grow from that model's distributions. Each level of a draft is one pass of the draft
    model over all rows; it reads the tokens emitted since the last pass and the nodes of the previous level. Rejected
    tokens of the last draft are cropped from its cache.

    Fields of every subclass: model (a model of transformers, or the name of one: a folder, an embedded model, one on
    the hub).
    """

    any_shape = True
    model: Any
    own_tokenizer: PreTrainedTokenizerBase | None = None  # of the draft model, where it is given by its name
    _vocabularies: Vocabularies | None = None  # where there are two

    def __post_init__(self) -> None:
        self.model, self.own_tokenizer = loaded(self.model)
        self.tokenizer = self.own_tokenizer
        self._reader = Reader(self.model)

    @property
    def reader(self) -> Reader:
        return self._reader

    @property
    def vocab_size(self) -> int | None:
        return None if self.model is None or self._vocabularies is not None else self._reader.vocab_size

    @property
    def notes(self) -> list[str]:
        found = super().notes
        if (drafted := self.vocabulary) is not None and drafted.ids is not None:
            found.append(
                f"the draft model has another tokenizer: it drafts the {len(drafted.ids):,} of {drafted.size:,} tokens "
                "that both have; string-level-exact drafts all of its own"
            )
        if (device := self._reader.target.device) != self._reader.device:
            found.append(f"the draft model is on {device}, the model on {self._reader.device}")
        return found

    def translate(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().translate(tokenizer)
        same = self.own_tokenizer is None or self.own_tokenizer.get_vocab() == tokenizer.get_vocab()
        self._vocabularies = None if same else Vocabularies(tokenizer, self.own_tokenizer)  # type: ignore[arg-type]
        self.tokenizer = self.own_tokenizer if same else None

    @property
    def shared(self) -> Mapping[int, int] | None:  # type: ignore[override]
        return self._reader.texts.shared

    def unread(self, row: Row, after: Sequence[int], read: int) -> list[int]:
        return super().unread(row, after, read) if self.shared is None else self._reader.texts.text(row, after)[read:]

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self._reader.texts.vocabulary

    def bind(self, target: Target) -> None:
        if self.model is None:
            raise unnamed(self)
        if self._vocabularies is not None and target.reads_sources:
            raise Refused(
                f"{method_name(self)}: the draft model has another tokenizer than {type(target.model).__name__}, whose "
                "sources it would have to read in the model's tokens: give one with the same tokenizer"
            )
        self._reader.fit(target)
        self._reader.texts = self._texts_for(target)

    def _texts_for(self, target: Target) -> RowTexts:
        if self._vocabularies is None:
            return RowTexts()
        return SharedTexts(self._vocabularies, target.vocabulary, self._reader.vocab_size)


class ContinuingModelDrafter(ModelDrafter, Continuing):
    """Drafts a chain, also behind the draft of another drafter. Fields of every subclass: length (tokens of the draft
    model at most)."""

    length: int

    @property
    def levels(self) -> int:
        return self.length

    @property
    def width(self) -> int:
        return self.length

    def extend_each(
        self, rows: Sequence[Row], after: Sequence[Sequence[int]], budget: Sequence[int]
    ) -> list[DraftTree]:
        self.reader.catch_up(rows, after)
        each = zip(rows, budget, after, strict=True)
        return self._grown([self._growing(row, most, drafted) for row, most, drafted in each])


class ChainDrafter(ContinuingModelDrafter):
    """Drafts a chain of tokens. Fields of every subclass: confidence (a draft ends after a token of lower
    probability)."""

    confidence: float

    @property
    def draws(self) -> Draws:
        return "one"

    def _grown(self, growing: Sequence[GrowingTree]) -> list[DraftTree]:
        ready = [tree for tree in growing if tree.frontier]
        if ready and all(map(self.greedy, ready)) and self.reader.decode_greedily(ready, self.confidence):
            return [self.finished(tree) for tree in growing]
        return super()._grown(growing)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        (node,), (law,) = nodes, laws
        tokens = self.chosen(growing, node, law)
        sure = all(law[token] >= self.confidence for token in tokens)
        added = growing.add(node, tokens, law)
        growing.end_level(added if sure else [])


def unnamed(drafter: Drafter, otherwise: str = "accelerate(draft=MODEL)") -> Refused:
    """The refusal of a drafter that was given no draft model. otherwise: another remedy than to name one."""
    name = method_name(drafter)
    return Refused(f"{name} needs a draft model: draft='{name}:model=NAME', or {otherwise}")
