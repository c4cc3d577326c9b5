"""Incremental detokenisation: text as far as tokens complete it, and as far as no stop string may begin in it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from truedraft.text.token_text import TokenText, token_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Pieces:
    """Incremental detokenisation: the pieces concatenate to the text of all ids, however they are divided.

    A token may be a part of a character, so an incomplete character is held back until later tokens complete it; if
    none do, it becomes a replacement character.

    Args:
        context: last ids of the text that these continue, which are not returned: some tokenizers drop the space
            at the start of a text.
        skip_special_tokens: leave out the text of special tokens.
        kept: special tokens, as text, that are not left out.
        marks: a text in the place of special tokens that are left out.
        continues: whether there is text before the output even if the context has only tokens that are left out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context: Sequence[int] = (),
        skip_special_tokens: bool = True,
        kept: Collection[str] = (),
        marks: Mapping[int, str] | None = None,
        continues: bool = False,
    ):
        texts = token_text(tokenizer)
        self._left_out = texts.left_out(skip_special_tokens, kept)
        shown = [id for id in context if id not in self._left_out]
        self._marks = marks or {}
        self._reader: _ByteReader | _WindowReader = (
            _ByteReader(texts, continues or bool(shown)) if texts.concatenates else _WindowReader(tokenizer, shown)
        )

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        return "".join(self._marks.get(id, "") if id in self._left_out else self._reader.read(id) for id in ids)

    def end(self) -> str:
        """The remaining text, an incomplete character included."""
        return self._reader.end()


def whole_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids without special tokens: that of their `Pieces`."""
    pieces = Pieces(tokenizer)
    return pieces.feed(ids) + pieces.end()


class _ByteReader:
    """Reads a text whose tokens are bytes that concatenate to it.

    continues: whether there is text before it.
    """

    def __init__(self, texts: TokenText, continues: bool):
        self._texts, self._begins = texts, texts.drops_space and not continues
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def read(self, token: int) -> str:
        data = self._texts.bytes_of(token)
        if self._begins and data:
            data, self._begins = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowReader:
    """Reads a text whose tokens depend on their neighbours, as those that divide words: each token is decoded together
    with the tokens before it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context: Sequence[int]):
        self._tokenizer, self._ids = tokenizer, list(context)
        self._start, self._sent = 0, len(self._ids)  # ids[start:sent] are already returned as text, and kept as context

    def read(self, token: int) -> str:
        self._ids.append(token)
        return self._piece(final=False)

    def end(self) -> str:
        return self._piece(final=True)

    def _piece(self, final: bool) -> str:
        before, now = self._decode(self._ids[self._start : self._sent]), self._decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        self._start, self._sent = self._sent, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


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

    def feed(self, text: str, ends: bool = True) -> str:
        """The text up to a stop string, or up to what may be the beginning of one.

        ends: whether a stop string that this piece completes ends the text; if not, the text goes on.
        """
        if self.found is not None:
            return ""
        held, new = self._held + text, len(self._held)
        starts = [(held.find(s, max(new - len(s) + 1, 0)), s) for s in self.strings] if ends else []
        places = [(at, s) for at, s in starts if at >= 0]
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
