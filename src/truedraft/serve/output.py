"""The text of a row as it grows, the tokens that go with it, and the usage of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.serve.job import Job
from truedraft.serve.listing import RowTokens
from truedraft.serve.model import ServedModel
from truedraft.serve.prediction import Prediction
from truedraft.serve.settings import Plan
from truedraft.text import tool_calls
from truedraft.text.tool_calls import ToolParser


@dataclass(frozen=True)
class Delta:
    """What was added to a row: text, tool calls and reasoning, and the tokens to list; see `RowTokens`."""

    text: str
    tokens: range
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""

    @property
    def empty(self) -> bool:
        return not (self.text or self.tool_calls or self.reasoning or self.tokens)


class RowOutput:
    """The text of one row, up to its stop string.

    Args:
        parser: splits the text into content, tool calls and reasoning; None where all of it is content.
        lists: whether the response lists its tokens.

    Attributes:
        listed: its tokens, as far as they are listed.
        reasoning_tokens: those of the reasoning, its tags included, which the parser tells from the answer.
    """

    def __init__(self, model: ServedModel, plan: Plan, job: Job, parser: ToolParser | None, lists: bool = False):
        self.model, self.plan, self.job, self._parser = model, plan, job, parser
        self.listed, self._lists = RowTokens(plan.listing, job), lists
        self._text = plan.shown.text(job.ids)
        self._read = 0
        self.prediction = None if plan.predicted is None else Prediction(plan.predicted)
        self._parts: list[tool_calls.Delta] = []  # what the parser has read since the last advance
        self.text_length = self.reasoning_tokens = 0
        self.has_calls = False
        self.finish_reason: str | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the token of `stop_token_ids`, that ended the text (vLLM's field)."""
        if self._text.found is not None:
            return self._text.found
        last = self.job.tokens[self._read - 1] if self._read else None
        return last if self.finish_reason in ("stop", "tool_calls") and last not in self.model.end_ids else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; tokens after it are dropped."""
        return self._text.found is not None

    def advance(self, count: int) -> Delta:
        """What the first `count` tokens add to the text; call it with all tokens once the job has finished."""
        start, self._read = self._read, count
        if self.prediction is not None:
            self.prediction.feed(self.job.tokens[start:count])
        visible = self._visible(start, count)
        text, rest = self._feed(visible), ""
        if self.job.finish_reason is not None and count == len(self.job.tokens):
            rest = self._text.end()
            self.finish_reason = "stop" if self.stopped else self.job.finish_reason
        elif self.stopped:
            self.finish_reason = "stop"
        self.text_length += len(text) + len(rest)
        tokens = self._tokens(visible, count) if self._lists else range(0)
        return Delta(text + rest, tokens) if self._parser is None else self._parsed(self._parser, rest, tokens)

    def _feed(self, tokens: Sequence[int]) -> str:
        """The text that tokens complete. The parser reads it token by token, so that those of reasoning are counted."""
        if self._parser is None:
            return self._text.feed(tokens)
        texts = []
        for token in tokens:
            texts.append(self._text.feed([token]))
            within = self._parser.in_reasoning
            self._parts.append(self._parser.feed(texts[-1]))
            self.reasoning_tokens += within or self._parser.in_reasoning
        return "".join(texts)

    def _tokens(self, visible: Sequence[int], count: int) -> range:
        """The tokens to list now."""
        ended = self.finish_reason is not None
        return self.listed.advance(visible, count, self.text_length, ended, self.stopped)

    def _parsed(self, parser: ToolParser, rest: str, tokens: range) -> Delta:
        parts = [*self._parts, parser.feed(rest), *([parser.finish()] if self.finish_reason is not None else [])]
        self._parts = []
        calls = tuple(call for part in parts for call in part.tool_calls)
        self.has_calls = self.has_calls or bool(calls)
        if self.finish_reason == "stop" and self.has_calls:
            self.finish_reason = "tool_calls"
        content, reasoning = ("".join(texts) for texts in zip(*((p.content, p.reasoning) for p in parts), strict=True))
        return Delta(content, tokens, calls, reasoning)

    def _visible(self, start: int, end: int) -> Sequence[int]:
        """The tokens from `start` on whose text is returned: all but the stop token that ended the row."""
        tokens = self.job.tokens[start:end]
        ended = self.job.finish_reason == "stop" and end == len(self.job.tokens)
        if ended and tokens and not self.plan.shown.keep_stop and tokens[-1] in self._ends:
            return tokens[:-1]
        return tokens

    @property
    def _ends(self) -> Sequence[int]:
        return self.job.settings.get("eos_token_id") or ()


def usage_of(plan: Plan, rows: Sequence[RowOutput]) -> dict[str, Any]:
    """OpenAI's `usage` of a request."""
    prompt = sum(map(len, plan.prompts))
    first = [row.job for row in rows[:: plan.choices]]
    emitted = sum(row._read for row in rows)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": emitted,
        "total_tokens": prompt + emitted,
        "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens for job in first), "audio_tokens": 0},
    }
    followed = [row.prediction for row in rows if row.prediction is not None]
    usage["completion_tokens_details"] = {
        "accepted_prediction_tokens": sum(prediction.accepted for prediction in followed),
        "rejected_prediction_tokens": sum(prediction.rejected for prediction in followed),
        "reasoning_tokens": sum(row.reasoning_tokens for row in rows), "audio_tokens": 0,
    }  # fmt: skip
    return usage


def figures_of(model: ServedModel, plan: Plan) -> dict[str, Any]:
    """What drafting came to in a request: our own part of a response."""
    passes = sum(job.passes for job in plan.jobs)
    tokens = sum(len(job.tokens) for job in plan.jobs)
    report = next((job.request.report() for job in plan.jobs if job.request is not None), None)
    return {
        "seed": plan.seed,
        "passes": passes,
        "tokens": tokens,
        "mean_acceptance_length": round(tokens / max(passes, 1), 4),
        "drafted_tokens": sum(job.offered for job in plan.jobs),
        "accepted_tokens": sum(job.accepted for job in plan.jobs),
        "cached_tokens": sum(job.cached_tokens for job in plan.jobs),
        "drafter": None if report is None else report.drafter,
        "guarantee": None if report is None else report.guarantee,
    }
