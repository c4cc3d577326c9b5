"""The shapes of responses and of their chunks: completions and chat completions, as in OpenAI's API reference."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from truedraft.serve.job import Job
from truedraft.serve.output import Delta, RowOutput
from truedraft.serve.settings import Plan
from truedraft.text.spelling import Spelled
from truedraft.text.tool_calls import ToolParser


class Format(ABC):
    """How the rows of one request are written.

    Args:
        id, created, model: of the response.
        plan: the rows.
        return_tokens: add single tokens to every choice.
    """

    object: str
    chunk_object: str

    def __init__(self, id: str, created: int, model: str, plan: Plan, return_tokens: bool):
        self.id, self.created, self.model, self.plan, self.return_tokens = id, created, model, plan, return_tokens

    def parser(self) -> ToolParser | None:
        """The parser of a row's text, None where all of it is content."""
        return None

    @property
    def lists(self) -> bool:
        """Whether choices list their tokens."""
        return self.plan.logprobs is not None or self.return_tokens

    def head(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    @abstractmethod
    def begin(self, index: int) -> list[dict[str, Any]]:
        """The choices of the chunks that come before any token of a row."""

    @abstractmethod
    def choices(self, index: int, row: RowOutput, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for what was added to a row, none where there is nothing to send yet."""

    @abstractmethod
    def choice(self, index: int, row: RowOutput, delta: Delta) -> dict[str, Any]:
        """The choice of a response for a finished row; the delta is all of it."""

    def chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self.head(self.chunk_object) | {"choices": list(choices)} | more

    def response(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self.head(self.object) | {"choices": list(choices)} | more

    def _with_tokens(self, choice: dict[str, Any], row: RowOutput, delta: Delta) -> dict[str, Any]:
        return choice | {"tokens": row.listed.texts(delta.tokens)} if self.return_tokens else choice

    def _read(self, index: int) -> Job:
        """The row that has the log-probabilities of a row's prompt: the first choice of this prompt."""
        return self.plan.jobs[index - index % self.plan.choices]

    def _with_prompt(self, part: dict[str, Any], index: int) -> dict[str, Any]:
        """A part of a response with `prompt_logprobs` of a row, where these are asked for."""
        if (count := self.plan.prompt_logprobs) is None:
            return part
        return part | {"prompt_logprobs": self.plan.listing.prompt(self._read(index).prompt_logprobs, count)}


@dataclass(frozen=True)
class Echo:
    """A prompt as it precedes its completions: its text, and its tokens where these are listed."""

    text: str
    tokens: Sequence[Spelled]


class CompletionFormat(Format):
    """`POST /v1/completions`.

    Args:
        echoes: of each prompt where it is to precede its completions, else none.
    """

    object = chunk_object = "text_completion"

    def __init__(self, *args: Any, echoes: Sequence[Echo] = ()):
        super().__init__(*args)
        self.echoes = echoes

    def _echo(self, index: int) -> Echo:
        return self.echoes[index // self.plan.choices] if self.echoes else Echo("", ())

    def begin(self, index: int) -> list[dict[str, Any]]:
        echo = self._echo(index).text
        return [self._choice(index, echo, self._prompt_logprobs(index), None, None)] if self.echoes else []

    def choices(self, index: int, row: RowOutput, delta: Delta) -> list[dict[str, Any]]:
        if delta.empty and not row.finish_reason:
            return []
        choice = self._choice(index, delta.text, self._logprobs(index, row, delta), row.finish_reason, row.stop_reason)
        return [self._with_tokens(choice, row, delta)]

    def choice(self, index: int, row: RowOutput, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(index, row, delta)
        if logprobs is not None and (of_prompt := self._prompt_logprobs(index)) is not None:
            logprobs = {name: of_prompt[name] + logprobs[name] for name in logprobs}
        text = self._echo(index).text + delta.text
        choice = self._choice(index, text, logprobs, row.finish_reason, row.stop_reason)
        return self._with_prompt(self._with_tokens(choice, row, delta), index)

    def _logprobs(self, index: int, row: RowOutput, delta: Delta) -> dict[str, Any] | None:
        if self.plan.logprobs is None:
            return None
        return row.listed.completion(delta.tokens, len(self._echo(index).text))

    def _prompt_logprobs(self, index: int) -> dict[str, Any] | None:
        """Of the tokens of an echo, where they are listed; the first has none."""
        if self.plan.logprobs is None or not self.echoes:
            return None
        read = [replace(one, top=one.top[: self.plan.logprobs]) for one in self._read(index).prompt_logprobs]
        return self.plan.listing.completion([*zip(self._echo(index).tokens, [None, *read], strict=True)])

    @staticmethod
    def _choice(
        index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None, stop: str | int | None
    ) -> dict[str, Any]:
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop,
        }  # fmt: skip


class ChatFormat(Format):
    """`POST /v1/chat/completions`.

    Args:
        parser: makes the parser of one row's text; None where all of it is content.
    """

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, parser: Callable[[], ToolParser | None]):
        super().__init__(*args)
        self._make_parser = parser

    def parser(self) -> ToolParser | None:
        return self._make_parser()

    def begin(self, index: int) -> list[dict[str, Any]]:
        return [self._chunk_choice(index, {"role": "assistant", "content": ""}, None, None, None)]

    def choices(self, index: int, row: RowOutput, delta: Delta) -> list[dict[str, Any]]:
        if delta.empty and not row.finish_reason:
            return []
        content: dict[str, Any] = {"content": delta.text} if delta.text or not row.finish_reason else {}
        content |= {"tool_calls": delta.tool_calls} if delta.tool_calls else {}
        content |= {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        logprobs = None if self.plan.logprobs is None else row.listed.chat(delta.tokens)
        end = (row.finish_reason, row.stop_reason)
        if not delta.tool_calls or row.finish_reason is None:
            return [self._with_tokens(self._chunk_choice(index, content, logprobs, *end), row, delta)]
        calls = self._with_tokens(self._chunk_choice(index, content, logprobs, None, None), row, delta)
        return [calls, self._chunk_choice(index, {}, None, *end)]  # clients end a call by a chunk behind it

    def response(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return self._with_prompt(super().response(choices, **more), 0)

    def choice(self, index: int, row: RowOutput, delta: Delta) -> dict[str, Any]:
        calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.tool_calls]
        content = None if calls and not delta.text else delta.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        choice = {
            "index": index,
            "message": message,
            "logprobs": None if self.plan.logprobs is None else row.listed.chat(delta.tokens),
            "finish_reason": row.finish_reason,
            "stop_reason": row.stop_reason,
        }
        return self._with_tokens(choice, row, delta)

    @staticmethod
    def _chunk_choice(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None, stop: str | int | None
    ) -> dict[str, Any]:
        return {
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop,
        }  # fmt: skip
