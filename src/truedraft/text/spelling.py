"""A text as its tokens spell it: for each token the bytes that it adds to the text, and its place there."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from truedraft.text.pieces import Pieces
from truedraft.text.token_text import TokenText

NEAR = 16  # characters of a given text that its tokens may lack in one place


@dataclass(frozen=True, slots=True)
class Spelled:
    """A token of a text.

    begins: whether no token with a text is before it, so that a tokenizer may drop its space.
    bytes: what it adds to the text, in UTF-8.
    text: the characters that it completes.
    start: characters that are complete before it. end: those that are complete once each of its bytes is in one.
    """

    token: int
    begins: bool
    bytes: bytes
    text: str
    start: int
    end: int

    def cut(self, length: int) -> Spelled:
        """The token in a text of which only the first `length` characters are left."""
        if self.end <= length:
            return self
        text = self.text[: max(length - self.start, 0)]
        return replace(self, bytes=text.encode(), text=text, start=min(self.start, length), end=length)


class Spelling:
    """A growing text, token by token; the bytes of its tokens concatenate to it.

    Args:
        texts: of its tokenizer.
        left_out: tokens that add nothing, see `TokenText.left_out`.
        context, continues: see `Pieces`.

    Attributes:
        tokens: those of the text so far.
    """

    def __init__(
        self,
        texts: TokenText,
        left_out: Collection[int] = (),
        context: Iterable[int] = (),
        continues: bool = False,
    ):
        self.tokens: list[Spelled] = []
        self._texts, self._left_out = texts, left_out
        before = [token for token in context if self._adds(token)]
        self._begins = not (before or continues)
        self._pieces = None if texts.concatenates else Pieces(texts.tokenizer, before, skip_special_tokens=False)
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._length, self._latest = 0, 0  # characters, and the latest token that adds something

    def add(self, tokens: Iterable[int]) -> None:
        """Add the tokens that follow."""
        for token in tokens:
            self._add(token, self._read(token))
            self._begins = self._begins and not self._adds(token)

    def add_silent(self, tokens: Iterable[int]) -> None:
        """Add tokens that are no part of the text, such as the one that ended it."""
        for token in tokens:
            self._add(token, b"")

    def end(self) -> None:
        """No tokens follow."""
        self._complete("" if self._pieces is None else self._pieces.end())

    def _read(self, token: int) -> bytes:
        """What the next token adds; where that depends on its neighbours, by the pieces of the text."""
        if token in self._left_out:
            return b""
        return self._texts.at(token, self._begins) if self._pieces is None else self._pieces.feed([token]).encode()

    def _adds(self, token: int) -> bool:
        return token not in self._left_out and bool(self._texts.bytes_of(token))

    def _add(self, token: int, added: bytes) -> None:
        if added and _breaks(self._decoder.getstate()[0] + added[:1]):
            self._complete()
        start, text = self._length, self._decoder.decode(added)
        self._length += len(text)
        incomplete = bool(added and self._decoder.getstate()[0])
        self._latest = len(self.tokens) if added else self._latest
        self.tokens.append(Spelled(token, self._begins, added, text, start, self._length + incomplete))

    def _complete(self, rest: str = "") -> None:
        """Bytes of which no character came become a replacement character; with more text it is the latest token's."""
        if rest := self._decoder.decode(b"", True) + rest:
            latest = self.tokens[self._latest]
            self.tokens[self._latest] = replace(latest, text=latest.text + rest)
            self._length += len(rest)


def spelled(texts: TokenText, tokens: Sequence[int], text: str) -> list[Spelled]:
    """The tokens of a given text; special ones add to it only where it has them. Where the tokenizer reads the text as
    another one (in lower case, without spaces), they are found in it by what they have in common."""
    spelling = Spelling(texts)
    at = 0
    for token in tokens:
        if token in texts.special and not text.startswith(texts.name(token), at):
            spelling.add_silent([token])
        else:
            spelling.add([token])
        at = spelling.tokens[-1].end
    spelling.end()
    whole = "".join(one.text for one in spelling.tokens) == text
    return spelling.tokens if whole else _aligned(spelling.tokens, text)


def _aligned(tokens: Sequence[Spelled], text: str) -> list[Spelled]:
    """Tokens of a similar text, in their places in a given one; those that are not found add nothing."""
    at, found, lowered = 0, list[Spelled](), text.lower() if len(text.lower()) == len(text) else text
    for one in tokens:
        word = one.text.strip().lower()
        place = lowered.find(word, at, at + len(word) + NEAR) if word else -1
        end = at if place < 0 else place + len(word)
        found.append(replace(one, bytes=text[at:end].encode(), text=text[at:end], start=at, end=end))
        at = end
    return found


def _breaks(data: bytes) -> bool:
    """Whether bytes are no character, nor the beginning of one."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason != "unexpected end of data"
    return False
