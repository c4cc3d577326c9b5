"""Stop strings of a request: its row ends with the token that completes one in the text of the output.

`StopStringCriteria` of `transformers` decides by tables over the whole vocabulary, which are computed in Python for
every new set of strings, while running streams wait (0.4 s for 50,000 tokens), and takes 0.2 ms a token. Here the text
is read as the response shows it, token by token. Strings that begin in the prompt do not count, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import BoolTensor, FloatTensor, LongTensor, tensor
from transformers import PreTrainedTokenizerBase

from truedraft.stopping import RowwiseCriterion
from truedraft.text.pieces import Pieces, StopText
from truedraft.text.token_text import token_text

CONTEXT = 8  # last prompt tokens with which an output is decoded
MARKS = 0xD800  # the first of the code points that are no characters, and that no text has


@dataclass(frozen=True)
class Shown:
    """How the text of an output is shown, and where stop strings end it.

    stop: the stop strings. keep_stop: whether they stay at the end of the text.
    least: tokens of the output before which no stop string ends it.
    skip_special_tokens: whether the text of special tokens is left out, but for `kept` ones. A stop string that has
        such a text is found even so.
    continues: whether the text goes on from that of the prompt even if this has only special tokens, so that no space
        is dropped at its start.
    """

    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    least: int = 0
    skip_special_tokens: bool = True
    kept: Collection[str] = ()
    continues: bool = False

    def text(self, prompt: Sequence[int]) -> OutputText:
        """A reader of the output that follows a prompt."""
        pieces = Pieces(
            self.tokenizer, prompt[-CONTEXT:], self.skip_special_tokens, self.kept, self._marks, self.continues
        )
        return OutputText(pieces, self.stop, self.keep_stop, self.least, self._names)

    @cached_property
    def _marks(self) -> dict[int, str]:
        """A mark in the text for each special token that it leaves out, if its name occurs in a stop string."""
        texts = token_text(self.tokenizer)
        hidden = sorted(texts.left_out(self.skip_special_tokens, self.kept) & texts.added.keys())
        found = [id for id in hidden if any(texts.added[id] in string for string in self.stop)]
        return {id: chr(MARKS + i) for i, id in enumerate(found)}

    @cached_property
    def _names(self) -> dict[str, str]:
        """The name of each special token that has a mark, by its mark."""
        return {mark: token_text(self.tokenizer).added[id] for id, mark in self._marks.items()}


class OutputText:
    """The text of an output as its tokens arrive, up to a stop string.

    Args:
        pieces: of the output, at its start; special tokens that are not shown may be marks in it.
        strings: the stop strings. keep: leave the stop string itself at the end of the text.
        least: tokens before which no stop string counts.
        names: the name of the special token for each mark.
    """

    def __init__(
        self,
        pieces: Pieces,
        strings: Sequence[str],
        keep: bool = False,
        least: int = 0,
        names: Mapping[str, str] | None = None,
    ):
        self._pieces, self._least, self._names, self._count = pieces, least, names or {}, 0
        self._given = {self._marked(string): string for string in strings}
        self._stop = StopText(list(self._given), keep)

    @property
    def found(self) -> str | None:
        """The stop string that has ended the text, None if none has; later tokens add nothing."""
        return None if self._stop.found is None else self._given[self._stop.found]

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that further tokens complete, as far as no stop string may begin in it."""
        early = max(self._least - self._count, 0)
        self._count += len(tokens)
        before = self._stop.feed(self._pieces.feed(tokens[:early]), ends=False) if early else ""
        return self._shown(before + self._stop.feed(self._pieces.feed(tokens[early:])))

    def end(self) -> str:
        """The rest of the text, at its end."""
        last = self._stop.feed(self._pieces.end())
        return self._shown(last + self._stop.end())

    def _marked(self, string: str) -> str:
        """A stop string with marks for special tokens, longer names first."""
        for mark, name in sorted(self._names.items(), key=lambda item: -len(item[1])):
            string = string.replace(name, mark)
        return string

    def _shown(self, text: str) -> str:
        """A text without its marks; a stop string at its end that is to be kept has the names for them."""
        if not self._names:
            return text
        kept = self._stop.found if self._stop.found is not None and self._stop.keep else ""
        body = text.removesuffix(kept)
        unmarked = body.translate(dict.fromkeys(map(ord, self._names)))
        return unmarked + (self._given[kept] if kept and len(body) < len(text) else "")


class StopStrings(RowwiseCriterion):
    """Ends one row after the token that completes a stop string.

    Args:
        text: reads the row's output, at its start.
        prompt: tokens of the prompt.
    """

    def __init__(self, text: OutputText, prompt: int):
        self._text, self._read = text, prompt

    def __call__(self, input_ids: LongTensor, scores: FloatTensor, **kwargs: Any) -> BoolTensor:
        """(1,) whether the row has ended. input_ids: (1, length) prompt and output."""
        new = input_ids[0, self._read :].tolist()
        self._read += len(new)
        self._text.feed(new)
        return tensor([self._text.found is not None])  # type: ignore[return-value]
