"""Incremental detokenisation: text as far as tokens complete it, and as far as no stop string may begin in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Pieces:
    """Incremental detokenisation: the pieces concatenate to the text of all ids.

    A token may be part of a character or of a word, so ids are decoded together with those before them, and an
    incomplete character is held back.

    Args:
        context: last ids of the text that these continue, which are not returned: some tokenizers drop the space
            before a first word.
        skip_special_tokens: leave out the text of special tokens.
        kept: special tokens, as text, that are not left out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: Collection[str] = (),
    ):
        self.tokenizer, self._skip = tokenizer, skip_special_tokens and not kept
        special = tokenizer.added_tokens_decoder.items() if skip_special_tokens and kept else ()
        self._left_out = {id for id, token in special if token.special and token.content not in kept}
        self.ids: list[int] = list(context)
        self.start, self.sent = 0, len(self.ids)  # ids[start:sent] are already returned as text, and kept as context

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
        shown = [id for id in ids if id not in self._left_out] if self._left_out else ids
        return str(self.tokenizer.decode(shown, skip_special_tokens=self._skip))


class StopText:
    """Cuts a text at the first stop string in it, and holds back what may become one.

    Args:
        strings: the stop strings.
        keep: leave the stop string itself at the end of the text.

    Attributes:
        found: the stop string, once one was found; later text is dropped.
    """

    def __init__(self, strings: Sequence[str], keep: bool = False):
        self.strings, self.keep = [s for s in strings if s], keep
        self.found: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """The text up to a stop string, or up to what may be the beginning of one."""
        if self.found is not None:
            return ""
        held = self._held + text
        places = [(held.find(s), s) for s in self.strings if s in held]
        if places:
            at, self.found = min(places, key=lambda place: (place[0] + len(place[1]), place[0]))  # complete first
            self._held = ""
            return held[: at + len(self.found) * self.keep]
        keep = max((_overlap(held, s) for s in self.strings), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def end(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest proper beginning of `string` that `text` ends with."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
