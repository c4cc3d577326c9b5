"""Processors of the API that transformers lacks: penalties for tokens that the output already has, and bad words.

OpenAI, "API reference: Create chat completion", frequency_penalty and presence_penalty; vLLM, "Sampling parameters",
bad_words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import FloatTensor, LongTensor
from transformers import PreTrainedTokenizerBase

from truedraft.sampling import RowwiseProcessor


class OutputPenalties(RowwiseProcessor):
    """Lowers the score of each token by `frequency` for every occurrence in the output, and by `presence` if any.

    Args:
        frequency, presence: in units of logits; negative values favour repetition.
        prompt: tokens of the prompt, padding included, which do not count.
    """

    def __init__(self, frequency: float, presence: float, prompt: int):
        self.frequency, self.presence, self.prompt = frequency, presence, prompt

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        processed = scores.clone()
        for row, output in zip(processed, input_ids[:, self.prompt :], strict=True):
            tokens, counts = output.unique(return_counts=True)
            row[tokens] -= self.frequency * counts + self.presence
        return processed  # type: ignore[return-value]


class BadWords(RowwiseProcessor):
    """Sets the score of a token to -inf where it would complete one of some sequences of tokens.

    The result is that of `generate(bad_words_ids=...)`, whose processor compares every sequence with the text; this one
    looks the end of the text up, once for each length.

    Args:
        sequences: token ids, none empty.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]):
        self._last: dict[tuple[int, ...], list[int]] = {}  # the tokens before the last one -> these last ones
        for *before, last in sequences:
            self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})

    def __call__(self, input_ids: LongTensor, scores: FloatTensor) -> FloatTensor:
        processed = scores.clone()
        longest = self._lengths[-1]
        ends = input_ids[:, max(input_ids.shape[1] - longest, 0) :].tolist() if longest else [[]] * len(scores)
        for row, end in zip(processed, ends, strict=True):
            for length in self._lengths:
                if length <= len(end) and (last := self._last.get(tuple(end[len(end) - length :]))):
                    row[last] = -torch.inf
        return processed  # type: ignore[return-value]


def spellings(tokenizer: PreTrainedTokenizerBase, word: str) -> list[list[int]]:
    """The token ids of a word at the beginning of a text, and after a space where these are others."""
    ways = [list(tokenizer(text, add_special_tokens=False).input_ids) for text in (word.lstrip(), " " + word.lstrip())]
    return ways[: 1 if ways[0] == ways[1] else 2]
