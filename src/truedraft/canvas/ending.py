"""Where a text ends: after an end token, or after the token that completes a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StopStringCriteria

OUTSIDE = 2**31  # an id that is in no vocabulary, and so in no stop string


class OutputStrings(StopStringCriteria):
    """Stop strings in the output alone: those that begin in the prompt do not count, as in OpenAI's API.

    prompt: its length.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: list[str], prompt: int):
        super().__init__(tokenizer, strings)
        self.prompt = prompt


def first_end(
    text: Sequence[int], start: int, ends: frozenset[int], stops: Sequence[StopStringCriteria] = ()
) -> int | None:
    """Index of the first token from `start` on that ends a text; None where none does.

    The criteria of `transformers` decide as they do after each token: a stop string may begin before `start`.
    """
    found = [i for i in range(start, len(text)) if text[i] in ends][:1]
    if stops and start < len(text):
        met = reduce(torch.logical_or, (criterion(_windows(text, start, criterion), None) for criterion in stops))
        found += (start + met.nonzero().flatten()[:1]).tolist()
    return min(found, default=None)


def _windows(text: Sequence[int], start: int, criterion: StopStringCriteria) -> torch.LongTensor:
    """(len(text) - start, width) the last tokens of each prefix that ends at `start` or later, as many as are read."""
    width = criterion.maximum_token_len
    prompt = criterion.prompt if isinstance(criterion, OutputStrings) else 0
    return torch.tensor([*[OUTSIDE] * (width + prompt), *text[prompt:]][start + 1 :]).unfold(0, width, 1)  # type: ignore[return-value]
