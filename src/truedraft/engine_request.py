"""A request of a running engine, as its caller sees it: tokens so far, how it ended, figures."""

from __future__ import annotations

from typing import Any, Literal

from truedraft.call.streaming import Stream
from truedraft.errors import Refused
from truedraft.logprobs import PromptLogprobs, TokenLogprobs
from truedraft.request import Request
from truedraft.stats import Report

Reason = Literal["stop", "length", "abort", "error"]


class EngineRequest:
    """A request of one row; made by `ContinuousEngine.add_request`.

    Attributes:
        seed: the seed of its noise: a token is drawn by a function of (seed, position).
        finish_reason: "stop" (an end-of-text token or another stopping criterion), "length" (the most tokens were
            emitted), "abort", "error", or None while it waits or runs.
    """

    def __init__(self, request: Request, seed: int, streamer: Any, report: Report):
        self.seed = seed
        self.finish_reason: Reason | None = None
        self._request, self._streamer, self._report = request, streamer, report
        self._stream = Stream(streamer, request.rows, request.history)

    @property
    def _row(self) -> Any:
        return self._request.rows[0]

    @property
    def tokens(self) -> list[int]:
        """The token ids emitted so far, without the prompt."""
        row = self._row
        return row.tokens[row.prompt : row.end]

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One for each of `tokens`; None where they were not requested."""
        kept = self._request.laws.logprobs
        return None if kept is None else kept.places()

    @property
    def prompt_logprobs(self) -> list[PromptLogprobs] | None:
        """One for each token of the prompt after its first, as far as it has been read; None where they were not
        requested."""
        scores = self._request.prompt_scores
        return None if scores is None else scores.places

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed, because the engine had kept their keys and values."""
        return self._request.cached_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def error(self) -> Exception | None:
        """The exception that one of its parts raised (processor, stopping criterion, streamer, rule, drafter), or
        with which it was not admitted; None where there was none."""
        return self._request.error

    def result(self) -> list[int]:
        """`tokens` of a finished request.

        Raises:
            Refused: it is not finished yet.
            Exception: its `error`, where it has one.
        """
        if not self.finished:
            raise Refused("the request is not finished: step() the engine until it is")
        if self.error is not None:
            raise self.error
        return self.tokens

    def report(self) -> Report:
        """Figures of its passes so far. `seconds["all"]` is the time since it was admitted, in which others ran too."""
        self._report.cached_tokens = self.cached_tokens
        return self._report

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self._request.passes else "waiting")
        return f"<EngineRequest {state}: {len(self.tokens)} tokens>"
