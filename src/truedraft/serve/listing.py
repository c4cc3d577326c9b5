"""How responses list the tokens of a text: their names, bytes and places, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from truedraft.logprobs import PromptLogprobs, TokenLogprobs
from truedraft.serve.job import Job
from truedraft.serve.stops import CONTEXT
from truedraft.text.spelling import Spelled, Spelling, spelled
from truedraft.text.token_text import TokenText, numbered

LEAST = -9999.0  # a log-probability in a response, as in OpenAI's API: JSON has no infinity

Place = tuple[Spelled, TokenLogprobs | None]  # a token, and its log-probabilities where they are asked for


class Listing:
    """The tokens of texts, as the parts of a response list them.

    Args:
        texts: of the tokenizer.
        left_out: special tokens that texts are shown without.
        continues: see `Shown`.
    """

    def __init__(self, texts: TokenText, left_out: Collection[int] = (), continues: bool = False):
        self._texts, self._left_out, self._continues = texts, left_out, continues

    def continued(self, prompt: Sequence[int]) -> Spelling:
        """The text that follows a prompt."""
        return Spelling(self._texts, self._left_out, prompt[-CONTEXT:], self._continues)

    def given(self, tokens: Sequence[int], text: str) -> list[Spelled]:
        """The tokens of a text that a request gave."""
        return spelled(self._texts, tokens, text)

    def chat(self, places: Sequence[Place]) -> dict[str, Any]:
        """`logprobs` of a choice of a chat completion. The bytes of its tokens concatenate to the text."""
        content = []
        for one, scored in places:
            assert scored is not None
            top = [self._of_chat(one, token, value) for token, value in scored.top]
            content.append(self._of_chat(one, one.token, scored.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def completion(self, places: Sequence[Place], offset: int = 0) -> dict[str, Any]:
        """`logprobs` of a choice of a completion. The first token of a prompt has none.

        offset: characters of the choice's text before these tokens' text.
        """
        return {
            "tokens": [self._shown(one) for one, _ in places],
            "token_logprobs": [None if scored is None else max(scored.logprob, LEAST) for _, scored in places],
            "top_logprobs": [None if scored is None else self._top(one, scored) for one, scored in places],
            "text_offset": [offset + one.start for one, _ in places],
        }

    def prompt(self, places: Sequence[PromptLogprobs], count: int) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` of a response, as in vLLM: for each token after the first the `count` likeliest at its
        place, and itself, by their ids."""
        listed: list[dict[str, Any] | None] = [None]
        for place in places:
            ranked = [(token, value, rank) for rank, (token, value) in enumerate(place.top[:count], 1)]
            ranked += [] if place.token in [token for token, _, _ in ranked] else [_own(place)]
            listed.append({str(token): self._ranked(token, value, rank) for token, value, rank in ranked})
        return listed

    def _ranked(self, token: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(value, LEAST), "rank": rank, "decoded_token": self._texts.name(token)}

    def _of_chat(self, one: Spelled, token: int, value: float) -> dict[str, Any]:
        """A token that is at a place or might have been there."""
        added = b"" if token in self._left_out else self._texts.at(token, one.begins)
        added = one.bytes if token == one.token else added
        return {"token": self._texts.name(token, one.begins), "logprob": max(value, LEAST), "bytes": [*added]}

    def _shown(self, one: Spelled) -> str:
        """The name of a token that adds what it stands for; of any other, such as a special one, what it adds."""
        whole = one.bytes and one.bytes == self._texts.at(one.token, one.begins)
        whole = whole and one.token not in self._texts.special
        return self._texts.name(one.token, one.begins) if whole else one.text

    def _top(self, one: Spelled, scored: TokenLogprobs) -> Mapping[str, float]:
        """The likeliest tokens and the one at the place; of two with one name, the less likely has that of its id."""
        top = {self._shown(one): scored.logprob}
        for token, value in scored.top:
            if token != one.token:
                name = self._texts.name(token, one.begins)
                top[numbered(token) if name in top else name] = value
        return {name: max(value, LEAST) for name, value in sorted(top.items(), key=lambda item: -item[1])}


def _own(place: PromptLogprobs) -> tuple[int, float, int]:
    return place.token, place.logprob, place.rank


class RowTokens:
    """The tokens of one row, which are listed once the text that they add has been given out.

    Args:
        listing: how they are listed.
        job: the row.
    """

    def __init__(self, listing: Listing, job: Job):
        self._listing, self._job, self._spelling = listing, job, listing.continued(job.ids)
        self._listed, self._length = 0, -1

    def advance(self, visible: Sequence[int], count: int, length: int, ended: bool, cut: bool) -> range:
        """The tokens to list now.

        Args:
            visible: those that were added to the text since the last call.
            count: the row's tokens so far; those beyond the visible ones are no part of the text.
            length: characters of the text that have been given out.
            ended: the text has ended. cut: a stop string ended it; what tokens spell beyond `length` is dropped.
        """
        self._spelling.add(visible)
        self._spelling.add_silent(self._job.tokens[len(self._spelling.tokens) : count])
        first, tokens = self._listed, self._spelling.tokens
        if ended:
            self._spelling.end()
            self._listed, self._length = count, length if cut else -1
        while self._listed < count and tokens[self._listed].end <= length:
            self._listed += 1
        return range(first, self._listed)

    def chat(self, span: range) -> dict[str, Any]:
        """`logprobs` of a choice of a chat completion."""
        return self._listing.chat(self._places(span))

    def completion(self, span: range, offset: int) -> dict[str, Any]:
        """`logprobs` of a choice of a completion; offset: characters of the choice's text before the row's."""
        return self._listing.completion(self._places(span), offset)

    def texts(self, span: range) -> list[dict[str, Any]]:
        """`tokens` of a choice: each with the text that it adds, and whether it is an accepted draft."""
        job = self._job
        return [{"id": job.tokens[i], "text": self._at(i).text, "drafted": job.drafted[i]} for i in span]

    def _places(self, span: range) -> list[Place]:
        return [(self._at(i), self._job.logprobs[i]) for i in span]

    def _at(self, index: int) -> Spelled:
        one = self._spelling.tokens[index]
        return one if self._length < 0 else one.cut(self._length)
