"""The text of single tokens, as bytes: what each token contributes to the text that it stands in.

A token may be a part of a word, whose space in front a tokenizer drops at the start of a text, or a part of a
character, which no text shows. So the text of a token is taken in the middle of a text, as bytes; the bytes of the
tokens of a text, concatenated, are its UTF-8.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from tokenizers import normalizers, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # the piece of one byte, in tokenizers with byte fallback
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # bytes that byte-level pieces show as such
BYTE_OF = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}
UTF8 = [*range(0xC0), *range(0xC2, 0xF5)]  # the bytes that texts may have
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}  # what a sequence of them has in JSON
SAMPLES, LENGTH = 40, 12  # texts of random tokens whose concatenated bytes are compared with the tokenizer's decoding


def token_text(tokenizer: PreTrainedTokenizerBase) -> TokenText:
    """The texts of a tokenizer's tokens; kept for a few tokenizers, and read again after tokens were added to one."""
    return _texts_of(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)
def _texts_of(tokenizer: PreTrainedTokenizerBase, size: int) -> TokenText:
    return TokenText(tokenizer)


class TokenText:
    """The bytes of each token of a tokenizer, in the middle of a text.

    Args:
        tokenizer: of any kind: byte-level, with byte fallback, of words and pieces, or of characters.

    Attributes:
        tokenizer: as above.
        size: tokens of the tokenizer.
        special: ids of the special tokens, which `skip_special_tokens` leaves out of texts.
        added: the text of each added token, special or not, by its id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.size = len(tokenizer)
        self.added = {id: token.content for id, token in tokenizer.added_tokens_decoder.items()}
        self.special = frozenset(tokenizer.all_special_ids) | {
            id for id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_level = backend is not None and '"ByteLevel"' in _decoder(backend)
        self._byte_fallback = backend is None or '"ByteFallback"' in _decoder(backend)

    def bytes_of(self, token: int) -> bytes:
        """What a token contributes to a text that it stands in the middle of; empty for ids without a token."""
        if token not in self._bytes:
            self._bytes[token] = self._read([token])[0]
        return self._bytes[token]

    def vocabulary(self, size: int) -> list[bytes]:
        """The bytes of the tokens from 0 to `size`, without that."""
        missing = [token for token in range(size) if token not in self._bytes]
        self._bytes |= zip(missing, self._read(missing), strict=True)
        return [self._bytes[token] for token in range(size)]

    def text(self, tokens: Sequence[int], skip_special_tokens: bool = False, begins: bool = False) -> str:
        """The text of tokens, by their bytes; bytes that are no whole character are replaced.

        begins: whether they begin a text, where some tokenizers drop a space.
        """
        shown = [token for token in tokens if not (skip_special_tokens and token in self.special)]
        found = b"".join(map(self.bytes_of, shown))
        if begins and self.drops_space:
            found = found.removeprefix(b" ")
        return found.decode(errors="replace")

    def at(self, token: int, begins: bool) -> bytes:
        """What a token contributes to a text at a place; begins: whether it begins the text."""
        found = self.bytes_of(token)
        return found.removeprefix(b" ") if begins and self.drops_space else found

    def name(self, token: int, begins: bool = False) -> str:
        """What a token is called at a place, so that it differs from others: its text there; of a special token its
        content; of a part of a character its bytes, as OpenAI's API writes them (`bytes:\\xe2\\x98`); and of a token
        without a text its id (`token_id:7`).
        """
        if token in self.special:
            return self.added.get(token) or numbered(token)
        found = self.at(token, begins)
        try:
            return found.decode() if self.bytes_of(token) else numbered(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(map(_printed, found))

    def names(self, tokens: Sequence[int]) -> list[str]:
        """The names of the tokens of a text. Special ones count as none of it: the space of a first word is dropped
        after them too."""
        first = next((i for i, t in enumerate(tokens) if t not in self.special and self.bytes_of(t)), len(tokens))
        return [self.name(token, begins=i <= first) for i, token in enumerate(tokens)]

    def left_out(self, skip_special_tokens: bool, kept: Collection[str] = ()) -> frozenset[int]:
        """The special tokens that texts are shown without; `kept` are shown, by their contents."""
        if not skip_special_tokens:
            return frozenset()
        return frozenset(token for token in self.special if self.added.get(token) not in kept)

    def spelled(self, text: str) -> list[int] | None:
        """Tokens that are no special ones and whose bytes, in the middle of a text, are this text: those of the
        tokenizer, if it does not change the text, else the longest that fit one after the other. None if there are
        no such tokens.
        """
        data = text.encode(errors="surrogatepass")
        found = [] if self._encoder is None else self._encoder.encode(text, add_special_tokens=False).ids
        if b"".join(map(self.bytes_of, found)) == data and self.special.isdisjoint(found):
            return list(found)
        return self._greedy(data)

    @cached_property
    def spells_all(self) -> bool:
        """Whether every text can be spelled: every byte has a token that is no special one."""
        return all(bytes([byte]) in self._by_bytes for byte in UTF8)

    @cached_property
    def drops_space(self) -> bool:
        """Whether the tokenizer drops a space at the start of a text."""
        spaced = next((token for token in self._ordinary if self.bytes_of(token)[:1] == b" "), None)
        return spaced is not None and self._decode([spaced]).encode() != self.bytes_of(spaced)

    @cached_property
    def concatenates(self) -> bool:
        """Whether the concatenated bytes of tokens are the tokenizer's text of them, as texts of random tokens show."""
        rng = random.Random(self.size)
        whole = [token for token in self._ordinary if _whole(self.bytes_of(token))]
        if not whole:
            return False
        texts = [rng.choices(whole, k=LENGTH) for _ in range(SAMPLES)]
        return all(self.text(tokens, begins=True) == self._decode(tokens) for tokens in texts)

    @cached_property
    def _ordinary(self) -> list[int]:
        return [token for token in range(self.size) if token not in self.added and token not in self.special]

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """The token of each text, special ones excepted; of several the first."""
        whole = self.vocabulary(self.size)
        return {data: token for token, data in reversed([*enumerate(whole)]) if data and token not in self.special}

    @cached_property
    def _encoder(self) -> Any | None:
        """The tokenizer, reading a text as if it went on, and without special tokens; None for one in Python."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        encoder = copy(backend)
        encoder.no_truncation()
        encoder.no_padding()
        for name, nothing in (("normalizer", normalizers.Sequence([])), ("pre_tokenizer", pre_tokenizers.Sequence([]))):
            if (part := getattr(encoder, name)) is not None:
                kept = _without_prefix(json.loads(part.__getstate__()))
                nothing.__setstate__(json.dumps(kept or {"type": "Sequence", PARTS[name]: []}).encode())
                setattr(encoder, name, nothing)
        encoder.encode_special_tokens = True
        return encoder

    def _greedy(self, data: bytes) -> list[int] | None:
        longest, found, at = max(map(len, self._by_bytes), default=0), list[int](), 0
        while at < len(data):
            ends = range(min(at + longest, len(data)), at, -1)
            end = next((end for end in ends if data[at:end] in self._by_bytes), None)
            if end is None:
                return None
            found.append(self._by_bytes[data[at:end]])
            at = end
        return found

    def _read(self, tokens: Sequence[int]) -> list[bytes]:
        pieces = iter(self.tokenizer.convert_ids_to_tokens([token for token in tokens if token < self.size]))
        found = [self._by_piece(token, next(pieces) if token < self.size else None) for token in tokens]
        unread = [i for i, data in enumerate(found) if data is None]
        for i, text in zip(unread, self._in_context([tokens[i] for i in unread]), strict=True):
            found[i] = text.encode(errors="replace")
        return [data or b"" for data in found]

    def _by_piece(self, token: int, piece: str | None) -> bytes | None:
        """The bytes of a token, if its name tells them.

        piece: its name in the tokenizer; None for an id without a token.
        """
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(BYTE_OF[c] for c in piece) if all(c in BYTE_OF for c in piece) else piece.encode()
        byte = BYTE.fullmatch(piece) if self._byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else None

    def _in_context(self, tokens: Sequence[int]) -> list[str]:
        """The text that each of these tokens adds to that of an ordinary word."""
        word = self._word
        before = self._decode(word)
        texts = self._decode_all([[*word, token] for token in tokens])
        return [text[len(before) :] if text.startswith(before) else "" for text in texts]

    @cached_property
    def _word(self) -> list[int]:
        """A token that is a letter or a word, none if there is none."""
        return next(([token] for token in self._ordinary if self._decode([token]).isalpha()), [])

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def _decode_all(self, texts: Sequence[list[int]]) -> list[str]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self._decode(tokens) for tokens in texts]
        return list(backend.decode_batch(texts, skip_special_tokens=False))


def numbered(token: int) -> str:
    """The name of a token by its id, as vLLM writes it."""
    return f"token_id:{token}"


def _printed(byte: int) -> str:
    return chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"


def _decoder(backend: object) -> str:
    """The decoder of a tokenizer of the `tokenizers` library, as JSON."""
    decoder = getattr(backend, "decoder", None)
    return "" if decoder is None else decoder.__getstate__().decode()


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, that puts nothing in front of a text; None if nothing is left of it."""
    if part["type"] == "Prepend":
        return None
    kept = {name: value for name, value in part.items() if name not in PARTS.values()}
    lists = {
        name: [found for found in map(_without_prefix, part[name]) if found is not None]
        for name in PARTS.values()
        if name in part
    }
    neutral = {"prepend_scheme": "never", "add_prefix_space": False}
    return kept | {name: value for name, value in neutral.items() if name in part} | lists


def _whole(data: bytes) -> bool:
    """Whether bytes are whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return bool(data)
