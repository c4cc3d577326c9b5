"""Log-probabilities of the tokens of a row and of its prompt, and of the likeliest tokens at their places."""

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


@dataclass(frozen=True, slots=True)
class PromptLogprobs(TokenLogprobs):
    """The same of a token of a prompt.

    rank: its place among all tokens at this place by their probabilities, from 1.
    """

    rank: int


class PromptScores:
    """The log-probabilities of the tokens of a prompt after its first, each given those before it; no logits are kept.

    Args:
        ids: (length,) the prompt.
        count: how many of the likeliest tokens are given at each place; 0 for none.

    Attributes:
        places: one for each token so far, from the second on.

    Raises:
        Refused: `count` is not an integer of 0 or more, or the prompt is embeddings (`ids` is None).
    """

    def __init__(self, ids: Tensor | None, count: int):
        self._count = checked(count, "prompt_logprobs")
        if ids is None:
            raise Refused(f"prompt_logprobs={count}: the prompt is embeddings, which have no tokens: leave it out")
        self._ids = ids
        self.places: list[PromptLogprobs] = []

    def restart(self) -> None:
        """The prompt will be read again from its first token on."""
        self.places.clear()

    def add(self, logits: Tensor) -> None:
        """The logits at the next positions of the prompt, in the order of their tokens; those of the last are ignored,
        since what follows it is no token of the prompt.

        logits: (n, V) before logits processors; not kept.
        """
        tokens = self._ids[len(self.places) + 1 :][: len(logits)].to(logits.device)
        logprobs = logits[: len(tokens)].float().log_softmax(-1)
        own = logprobs.gather(-1, tokens[:, None])
        ranks = (logprobs > own).sum(-1) + 1
        values, likeliest = logprobs.topk(min(self._count, logprobs.shape[-1]))
        found = (tokens, own[:, 0], likeliest, values, ranks)
        for token, value, top, of_top, rank in zip(*(one.tolist() for one in found), strict=True):
            self.places.append(PromptLogprobs(token, value, tuple(zip(top, of_top, strict=True)), rank))


class Logprobs:
    """The log-probabilities of one row, of which one tensor of logits is kept: that of the last step.

    Args:
        row: their row.
        count: how many of the likeliest tokens are given at each place; 0 for none.

    Raises:
        Refused: `count` is not an integer of 0 or more.
    """

    def __init__(self, row: Row, count: int):
        self._row, self._count = row, checked(count, "logprobs")
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


def checked(count: int, name: str) -> int:
    """A number of likeliest tokens.

    Raises:
        Refused: it is not an integer of 0 or more.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise Refused(f"{name}={count!r}: give an integer of 0 or more, or None")
    return count
