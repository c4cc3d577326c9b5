"""Acceptance of drafted chains on texts that the target has written."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.drafters._learned import Metrics


class Walk:
    """Counts, over responses, how far chains drafted at every position are right, and the passes of decoding with them.

    Args:
        drafted: positions of a draft that are measured.
    """

    def __init__(self, drafted: int):
        self._right, self._tried = [0] * drafted, [0] * drafted
        self._tokens = self._passes = 0

    def add(self, reach: Sequence[int], first: int, length: int) -> None:
        """Add one text.

        Args:
            reach: by position i of the text, how many leading tokens of the chain drafted for the tokens from i + 2 on,
                with token i + 1 pending, are right.
            first: the prompt's last position.
            length: of the text.
        """
        for i in range(first, length - 2):
            for place in range(min(reach[i] + 1, len(self._tried), length - 2 - i)):
                self._tried[place] += 1
                self._right[place] += place < reach[i]
        i = first
        while i < length - 2:
            i, self._passes = i + 1 + reach[i], self._passes + 1
        self._tokens += max(length - 2 - first, 0)

    def metrics(self) -> Metrics:
        """`tokens_per_pass`, and `acceptance` by position among the drafts whose earlier tokens are right."""
        rates = [round(a / b, 4) for a, b in zip(self._right, self._tried, strict=True) if b]
        return {"tokens_per_pass": round(self._tokens / max(self._passes, 1), 3), "acceptance": rates}
