"""Incremental detokenisation: text as its tokens come, never half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Pieces:
    """Incremental detokenisation: the pieces concatenate to the text of all ids.

    A token may be part of a character or of a word, so ids are decoded together with those before them, and an
    incomplete character is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = self.sent = 0  # ids[start:sent] are already returned as text, and kept as context

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        self.ids += ids
        return self._piece(final=False)

    def end(self) -> str:
        """The remaining text, an incomplete character included."""
        return self._piece(final=True)

    def _piece(self, final: bool) -> str:
        before = self._decode(self.ids[self.start : self.sent])
        now = self._decode(self.ids[self.start :])
        if len(now) <= len(before) or (now.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        self.start, self.sent = self.sent, len(self.ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
