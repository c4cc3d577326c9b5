"""A back-off trigram model in bounded memory: what followed the last two tokens, or else the last one, or else any."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

KEPT = 16  # tokens counted after a context, at most
DISCOUNT = 0.5  # taken from every count, or that share of one below 1, for the tokens that were not counted
CONTEXT = 400  # bytes of a context, approximately


class Katz:
    """Counts of n-grams of one to three tokens, and the distributions that they give by Katz's back-off.

    A counted token has its count, less a discount, over those of its context; the rest of the probability is shared
    among the others as after the context without its first token (Katz, 1987; discounted absolutely, since counts of
    counts, which Good and Turing's discount needs, are few in a short text). Counts may be expected ones, below 1.

    contexts: kept; the least recently counted are forgotten first.
    """

    def __init__(self, contexts: int):
        self._most = contexts
        self._counts: OrderedDict[tuple[int, ...], dict[int, float]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Memory, approximately, in bytes."""
        return CONTEXT * len(self._counts)

    def copy(self) -> Katz:
        """Another with the same counts."""
        made = Katz(self._most)
        made._counts = OrderedDict((context, dict(counts)) for context, counts in self._counts.items())
        return made

    def count(self, before: Sequence[int], token: int, times: float = 1.0) -> None:
        """Count a token after the last two of those before it; negative ones are no tokens, and end a context.

        times: how often, or the probability that it follows.
        """
        if token < 0:
            return
        for length in range(min(3, 1 + len(before))):
            context = tuple(before[len(before) - length :])
            if min(context, default=0) < 0:
                return
            counts = self._counts.setdefault(context, {})
            self._counts.move_to_end(context)
            if token not in counts and len(counts) == KEPT:
                del counts[min(counts, key=counts.__getitem__)]
            counts[token] = counts.get(token, 0.0) + times
        while len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def count_all(self, text: Sequence[int]) -> None:
        """Count every token of a text."""
        for at, token in enumerate(text):
            self.count(text[max(at - 2, 0) : at], token)

    def law(self, before: Sequence[int]) -> dict[int, float]:
        """Probabilities of the counted tokens after the last two of some; those of all sum to 1, or there are none."""
        return self._after(tuple(before[-2:]))

    def _after(self, context: tuple[int, ...]) -> dict[int, float]:
        others = self._after(context[1:]) if context else {}
        if not (counts := self._counts.get(context)):
            return others
        total, share = sum(counts.values()), DISCOUNT if others.keys() - counts.keys() else 0.0
        law = {token: (count - share * min(count, 1.0)) / total for token, count in counts.items()}
        left = 1.0 - sum(law.values())
        rest = sum(chance for token, chance in others.items() if token not in counts)
        return law | {token: left * chance / rest for token, chance in others.items() if token not in counts}
