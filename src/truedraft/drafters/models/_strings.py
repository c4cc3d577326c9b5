"""Base class of drafters whose draft model drafts text in the tokens of its own tokenizer, whatever the target's is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.card import method_name
from truedraft.drafters.models._model import ContinuingModelDrafter
from truedraft.drafters.models._vocabularies import RenderedTexts, RowTexts, Vocabularies
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import Row


class StringDrafter(ContinuingModelDrafter):
    """Grows a tree of the draft model's own tokens, and drafts the target's tokens that their text is."""

    @property
    def vocab_size(self) -> int | None:
        return None

    def translate(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = None
        if self.own_tokenizer is not None:
            self._vocabularies = Vocabularies(tokenizer, self.own_tokenizer)

    def _texts_for(self, target: Target) -> RowTexts:
        if self._vocabularies is None:
            raise Refused(
                f"{method_name(self)} needs both tokenizers: give accelerate() the model's, and the draft model by its "
                "name"
            )
        self._texts = self._rendered(self._vocabularies, target)
        return self._texts

    def _rendered(self, vocabularies: Vocabularies, target: Target) -> RenderedTexts:
        """The rows in the draft model's tokens."""
        return RenderedTexts(vocabularies, self.reader.vocab_size)

    def unread(self, row: Row, after: Sequence[int], read: int) -> list[int]:
        return self._texts.text(row, after)[read:]

    def laws(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """(k, n) distributions over the draft model's own tokens, which processors of the target's do not apply to."""
        return logits.softmax(-1).nan_to_num_(0.0)
