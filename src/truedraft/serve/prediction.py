"""How much of a prediction became output: `accepted_prediction_tokens` and `rejected_prediction_tokens`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MATCH = 3  # consecutive equal tokens that find the position again after a change


def accepted_tokens(predicted: Sequence[int], emitted: Sequence[int]) -> int:
    """The tokens of a prediction that appear in the output ("Predicted Outputs" of OpenAI's API reference).

    The output is followed through the prediction from its beginning; where it departs, it is found again at the nearest
    `MATCH` equal tokens. Every token of the prediction counts once. This depends on the two texts alone, not on which
    of the tokens were drafted.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for end in range(MATCH, len(predicted) + 1):
        places.setdefault(tuple(predicted[end - MATCH : end]), []).append(end)
    found, at = bytearray(len(predicted)), 0
    following = True
    for end in range(1, len(emitted) + 1):
        if following and at < len(predicted) and predicted[at] == emitted[end - 1]:
            found[at], at = 1, at + 1
            continue
        following = False
        ends = places.get(tuple(emitted[end - MATCH : end])) if end >= MATCH else None
        if ends:
            at, following = _nearest(ends, at), True
            found[at - MATCH : at] = b"\1" * MATCH
    return sum(found)


def _nearest(ends: Sequence[int], at: int) -> int:
    after = bisect_left(ends, at)
    return min(ends[max(after - 1, 0) : after + 1], key=lambda end: abs(end - at))
