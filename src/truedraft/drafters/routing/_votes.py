"""The class of a text, by votes of its tokens: learned from a few examples of each class, by counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

UNSEEN = 0.5  # added to every count, so that an n-gram seen once in the examples of one class does not decide alone


class Votes:
    """A classifier of token ids.

    At each token of a text, the longest n-gram that ends with it and that any example has votes for the classes, in
    proportion to its frequency in their examples. A token that no example has votes for none.

    Args:
        examples: for each class, texts as token ids.
        longest: tokens of an n-gram, at most.
    """

    def __init__(self, examples: Sequence[Sequence[Sequence[int]]], longest: int):
        self._longest = longest
        counts = [_counted(texts, longest) for texts in examples]
        totals = [sum(map(len, texts)) for texts in examples]
        self._shares: dict[tuple[int, ...], list[float]] = {}
        for ngram in {ngram for count in counts for ngram in count}:
            rates = [(count[ngram] + UNSEEN) / total for count, total in zip(counts, totals, strict=True)]
            self._shares[ngram] = [rate / sum(rates) for rate in rates]

    def of(self, tokens: Sequence[int]) -> list[float]:
        """For each class, its share of the votes that the tokens of a text have, from 0 to 1."""
        found = [
            shares
            for end in range(1, len(tokens) + 1)
            if (shares := self._at(tuple(tokens[max(end - self._longest, 0) : end]))) is not None
        ]
        return [sum(votes) / len(tokens) for votes in zip(*found, strict=True)]

    def _at(self, last: tuple[int, ...]) -> list[float] | None:
        """The votes at a token, the last one of these."""
        return next((found for i in range(len(last)) if (found := self._shares.get(last[i:])) is not None), None)

    def clear(self, tokens: Sequence[int], lead: float) -> int | None:
        """The class that is `lead` or more before every other one; None where there is none."""
        votes = sorted(((share, k) for k, share in enumerate(self.of(tokens))), reverse=True)
        if not votes or votes[0][0] - (votes[1][0] if len(votes) > 1 else 0.0) < lead:
            return None
        return votes[0][1]


def _counted(texts: Sequence[Sequence[int]], longest: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[end - n : end])
        for text in texts
        for end in range(1, len(text) + 1)
        for n in range(1, min(longest, end) + 1)
    )
