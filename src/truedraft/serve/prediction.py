"""How much of a prediction became output: `accepted_prediction_tokens` and `rejected_prediction_tokens`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MATCH = 3  # consecutive equal tokens that find the position again after a change


class Prediction:
    """How many tokens of a prediction appear in an output ("Predicted Outputs" of OpenAI's API reference).

    The output is followed through the prediction from its beginning; where it departs, it is found again at the nearest
    `MATCH` equal tokens. Every token of the prediction counts once. This depends on the two texts alone, not on which
    of the tokens were drafted.

    Attributes:
        accepted: tokens of the prediction that appear in the output so far.
    """

    def __init__(self, predicted: Sequence[int]):
        self._predicted = predicted
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(MATCH, len(predicted) + 1):
            self._ends.setdefault(tuple(predicted[end - MATCH : end]), []).append(end)
        self._found, self._at, self._following = bytearray(len(predicted)), 0, True
        self._last: tuple[int, ...] = ()
        self.accepted = 0

    @property
    def rejected(self) -> int:
        return len(self._predicted) - self.accepted

    def feed(self, emitted: Sequence[int]) -> None:
        """Follow the next tokens of the output."""
        for token in emitted:
            self._last = (*self._last, token)[-MATCH:]
            if self._following and self._at < len(self._predicted) and self._predicted[self._at] == token:
                self._take(self._at, self._at + 1)
                continue
            ends = self._ends.get(self._last)
            self._following = ends is not None
            if ends is not None:
                end = _nearest(ends, self._at)
                self._take(end - MATCH, end)

    def _take(self, start: int, end: int) -> None:
        self.accepted += self._found.count(0, start, end)
        self._found[start:end] = b"\1" * (end - start)
        self._at = end


def _nearest(ends: Sequence[int], at: int) -> int:
    after = bisect_left(ends, at)
    return min(ends[max(after - 1, 0) : after + 1], key=lambda end: abs(end - at))
