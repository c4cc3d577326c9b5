"""Draft models with another tokenizer than the target's: which tokens both have, and a row's text in the other's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.drafters._candidates import DraftVocabulary
from truedraft.text.token_text import BYTE, token_text
from truedraft.tree import Row

LONGEST = 32  # tokens of a word; a longer one is cut
WORDS = 100_000  # whose tokens are kept
ANCHORS = ("a", ".", "\n")  # text before a word, one with which it does not share tokens


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """The UTF-8 bytes that each token adds to a text in which it is not the first; without special tokens and those
    that stand for no text."""
    texts = token_text(tokenizer)
    silent = texts.special | {tokenizer.unk_token_id}
    found = enumerate(texts.vocabulary(len(tokenizer)))
    return {token: data for token, data in found if data and token not in silent}


def by_bytes(tokenizer: PreTrainedTokenizerBase, texts: Mapping[int, bytes]) -> dict[bytes, int]:
    """The token of each text; of two with one text that which is no single byte's."""
    single = {token for token in texts if BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(token)))}
    order = sorted(texts, key=lambda token: (token not in single, -token))
    return {texts[token]: token for token in order}


class Vocabularies:
    """Two tokenizers: that of the target and that of its draft model."""

    def __init__(self, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase):
        self.target, self.draft = target, draft
        self._texts = token_bytes(target)
        self._words: dict[bytes, list[int]] = {}
        self._special = self._corresponding()

    @cached_property
    def shared(self) -> dict[int, int]:
        """Target's token -> the draft model's, of those with the same text and of the ends of texts."""
        mine, others = by_bytes(self.target, self._texts), by_bytes(self.draft, self.reverse._texts)
        found = {token: others[text] for text, token in mine.items() if text in others}
        if (end := self._special.get(self.target.eos_token_id)) is not None:
            found[self.target.eos_token_id] = end
        return found

    def _corresponding(self) -> dict[int, int]:
        """Special tokens of the target with those of the draft model that have their names or parts."""
        names = {token.content: i for i, token in self.draft.added_tokens_decoder.items() if token.special}
        found = {
            i: names[token.content]
            for i, token in self.target.added_tokens_decoder.items()
            if token.special and token.content in names and i != self.target.unk_token_id
        }
        for part in ("bos_token_id", "eos_token_id"):
            mine, other = getattr(self.target, part, None), getattr(self.draft, part, None)
            if mine is not None and other is not None:
                found.setdefault(mine, other)
        return found

    @cached_property
    def begin(self) -> list[int]:
        """What the draft model's tokenizer puts before a text."""
        plain = self.draft.encode("a", add_special_tokens=False)
        whole = self.draft.encode("a")
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return whole[:at]

    @cached_property
    def strips(self) -> bool:
        """Whether the space that the first token of a text begins with is none of the text."""
        return token_text(self.target).drops_space

    @cached_property
    def _anchors(self) -> list[tuple[str, list[int]]]:
        return [(text, self.draft.encode(text, add_special_tokens=False)) for text in ANCHORS]

    def word(self, text: bytes, first: bool) -> list[int]:
        """The draft model's tokens of a word; first: whether it begins a text. An incomplete character at its end has
        none."""
        if not first and (kept := self._words.get(text)) is not None:
            return kept
        string = text.decode(errors="ignore")
        found = self._encoded(string, first) if string else []
        if not first:
            if len(self._words) >= WORDS:
                self._words.clear()
            self._words[text] = found
        return found

    def _encoded(self, string: str, first: bool) -> list[int]:
        plain = self.draft.encode(string, add_special_tokens=False)
        if first:
            return plain
        for anchor, before in self._anchors:
            whole = self.draft.encode(anchor + string, add_special_tokens=False)
            if whole[: len(before)] == before and len(whole) > len(before):
                return whole[len(before) :]
        return plain

    def special(self, token: int) -> int | None:
        """The draft model's token for a special one of the target."""
        return self._special.get(token)

    @cached_property
    def reverse(self) -> Vocabularies:
        """The same with the two tokenizers exchanged."""
        return Vocabularies(self.draft, self.target)

    def text_of(self, token: int) -> bytes:
        """What a token adds to a text; empty for a special one."""
        return self._texts.get(token, b"")


@dataclass
class Rendering:
    """A row's text in the draft model's tokens, word by word: one is complete when the next begins, with a space.

    ids: of the complete words, which stay the same.
    read: tokens of the row so far. word: text of the last one, which may go on; length: its tokens; first: whether it
        begins the text.
    """

    vocabularies: Vocabularies
    ids: list[int] = field(default_factory=list)
    read: int = 0
    word: bytes = b""
    length: int = 0
    first: bool = True

    def continued(self, tokens: Sequence[int], after: Sequence[int] = ()) -> Rendering:
        """That of a row, whose tokens go on where they ended the last time, and of drafted tokens after it."""
        if self.read == 0:
            self.ids = list(self.vocabularies.begin)
            self.read = int(list(tokens[:1]) == [self.vocabularies.target.bos_token_id])
        self._feed(tokens[self.read :])
        self.read = len(tokens)
        if not after:
            return self
        copied = replace(self, ids=[*self.ids])
        copied._feed(after)
        return copied

    @property
    def whole(self) -> list[int]:
        """The draft model's tokens of all of the text."""
        return [*self.ids, *self._last]

    def __len__(self) -> int:
        return len(self.ids) + len(self._last)

    @property
    def _last(self) -> list[int]:
        return self.vocabularies.word(self.word, self.first) if self.word else []

    def drafted(self, tokens: Sequence[int], own: Sequence[int]) -> list[int]:
        """The target's tokens that follow, for the draft model's tokens `own` after the text.

        tokens: the target's, of the text. Where its tokenizer splits the text otherwise, `own` is split alone.
        """
        begun = list(tokens[len(tokens) - self.length :])
        split = Rendering(self.vocabularies.reverse, word=self.word, length=self.length, first=self.first)
        split._feed(own)
        if split.whole[: len(begun)] == begun:
            return split.whole[len(begun) :]
        alone = Rendering(self.vocabularies.reverse, first=False)
        alone._feed(own)
        return alone.whole

    def _feed(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            text = self.vocabularies.text_of(token)
            begins = text[:1] == b" " and not self.word[-1:].isspace()
            if self.word and (not text or begins or self.length >= LONGEST):
                self.ids = self.whole
                self.word, self.length, self.first = b"", 0, False
            begun = text and self.first and not self.length
            if begun and self.vocabularies.strips:
                text = text.removeprefix(b" ")
            if text or begun:
                self.word, self.length = self.word + text, self.length + 1
            elif (other := self.vocabularies.special(token)) is not None:
                self.ids.append(other)


class RowTexts:
    """The texts of rows as a draft model with the target's tokenizer reads them.

    shared: target's token -> the draft model's; None where they are the same.
    vocabulary: of the tokens that are drafted; None for all of the target's.
    """

    shared: Mapping[int, int] | None = None
    vocabulary: DraftVocabulary | None = None

    def length(self, row: Row) -> int:
        """How many tokens a row has."""
        return len(row.tokens)

    def text(self, row: Row, after: Sequence[int] = ()) -> list[int]:
        """The tokens of a row and of drafted ones after it."""
        return [*row.tokens, *after]

    def settled(self, row: Row) -> int:
        """How many of the first of them stay the same."""
        return len(row.tokens)

    def end(self, row: Row) -> None:
        """The row is finished."""

    def logits(self, logits: Tensor, vocabulary: int) -> Tensor:
        """(..., n) logits of the tokens that are drafted, from those of the draft model; n is `vocabulary`, the size of
        the target's, where all are."""
        return sized(logits, vocabulary)

    def columns(self, most: int) -> Tensor | int:
        """The draft model's tokens that are drafted, ascending; a number for the first so many, at most `most`."""
        return most

    def own_of(self, tokens: Iterable[int]) -> list[int]:
        """The draft model's tokens for tokens of the target, where it has them."""
        return list(tokens)

    def target_of(self, tokens: Sequence[int]) -> Sequence[int]:
        """The target's tokens for those that the draft model drafted."""
        return tokens


class RenderedTexts(RowTexts):
    """The same as a draft model with another tokenizer reads them, which drafts its own tokens.

    Args:
        own_size: logits of the draft model.
    """

    def __init__(self, vocabularies: Vocabularies, own_size: int):
        self.vocabularies, self._own_size = vocabularies, own_size
        self._renderings: dict[Row, Rendering] = {}

    def rendering(self, row: Row, after: Sequence[int] = ()) -> Rendering:
        return self._renderings.setdefault(row, Rendering(self.vocabularies)).continued(row.tokens, after)

    def length(self, row: Row) -> int:
        return len(self.rendering(row))

    def text(self, row: Row, after: Sequence[int] = ()) -> list[int]:
        return self.rendering(row, after).whole

    def settled(self, row: Row) -> int:
        return len(self.rendering(row).ids)

    def end(self, row: Row) -> None:
        self._renderings.pop(row, None)

    def logits(self, logits: Tensor, vocabulary: int) -> Tensor:
        return logits

    def columns(self, most: int) -> Tensor | int:
        return self._own_size

    def own_of(self, tokens: Iterable[int]) -> list[int]:
        """The draft model's tokens without text: a special token of the target ends the text that is drafted, as all of
        these do."""
        return self._textless

    @cached_property
    def _textless(self) -> list[int]:
        return [own for own in range(self._own_size) if not self.vocabularies.reverse.text_of(own)]


class SharedTexts(RenderedTexts):
    """The same, where the tokens that both have are drafted.

    Args:
        size, own_size: logits of the target, and of the draft model.
    """

    def __init__(self, vocabularies: Vocabularies, size: int, own_size: int):
        super().__init__(vocabularies, own_size)
        self.shared = {t: own for t, own in vocabularies.shared.items() if t < size and own < own_size}
        self.vocabulary = DraftVocabulary(size, torch.tensor(sorted(self.shared)))
        self._others = torch.tensor([self.shared[token] for token in sorted(self.shared)])
        self._own = self.shared
        self._target = {own: token for token, own in self._own.items()}
        self._columns = torch.tensor(sorted(self._target))

    def logits(self, logits: Tensor, vocabulary: int) -> Tensor:
        return logits[..., self._others.to(logits.device)]

    def columns(self, most: int) -> Tensor | int:
        return self._columns

    def own_of(self, tokens: Iterable[int]) -> list[int]:
        return [self._own[token] for token in tokens if token in self._own]

    def target_of(self, tokens: Sequence[int]) -> Sequence[int]:
        return [self._target[token] for token in tokens]


def sized(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits cut or padded to the target's vocabulary: models with one tokenizer pad it differently."""
    if logits.shape[-1] == vocabulary:
        return logits
    if logits.shape[-1] > vocabulary:
        return logits[..., :vocabulary]
    return torch.nn.functional.pad(logits, (0, vocabulary - logits.shape[-1]), value=-torch.inf)
