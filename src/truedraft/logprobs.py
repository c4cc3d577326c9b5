"""Log-probabilities of the emitted tokens of a row, and of the likeliest tokens at their places."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from truedraft.errors import Refused
from truedraft.tree import Row


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the target's probabilities at the place of one token, before logits processors.

    token, logprob: the emitted token.
    top: (token, logprob) of the likeliest tokens, in descending order; the emitted token need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Logprobs:
    """The log-probabilities of one row, of which one tensor of logits is kept: that of the last step.

    Args:
        row: their row.
        count: how many of the likeliest tokens are given at each place; 0 for none.

    Raises:
        Refused: `count` is not an integer of 0 or more.
    """

    def __init__(self, row: Row, count: int):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise Refused(f"logprobs={count!r}: give an integer of 0 or more, or None")
        self._row, self._count = row, count
        self._places: list[TokenLogprobs] = []
        self._logits: Tensor | None = None  # (V,) of the step after `_places`

    def add(self, logits: Tensor) -> None:
        """The logits of the row's next token; they replace earlier ones of the same step.

        logits: (V,) fp32, before logits processors; copied.
        """
        self._reduce()
        del self._places[self._row.step :]  # of tokens that were removed from the row
        self._logits = logits.clone()

    def places(self) -> list[TokenLogprobs]:
        """One for each emitted token, up to the end of the row."""
        self._reduce()
        row = self._row
        return self._places[: row.step if row.end is None else row.end - row.prompt]

    def _reduce(self) -> None:
        step = len(self._places)
        if self._logits is None or step >= self._row.step:
            return
        token, logprobs = self._row.tokens[self._row.prompt + step], self._logits.log_softmax(-1)
        values, tokens = logprobs.topk(min(self._count, len(logprobs)))
        top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        self._places.append(TokenLogprobs(token, float(logprobs[token]), top))
        self._logits = None
