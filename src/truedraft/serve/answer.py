"""The answer to a request: one JSON document, or server-sent events; rows end when the client goes away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from secrets import token_hex
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from truedraft.serve.errors import ApiError
from truedraft.serve.formats import Format
from truedraft.serve.job import advances, prompts_read
from truedraft.serve.loop import EngineLoop
from truedraft.serve.model import ServedModel
from truedraft.serve.output import RowOutput, figures_of, usage_of
from truedraft.serve.protocol import StreamOptions
from truedraft.serve.sending import EVENTS, Outlet, head, part
from truedraft.serve.settings import Plan

JSON = {"content-type": "application/json"}
DONE = b"data: [DONE]\n\n"
BLOCK = 64  # with stream_options.include_obfuscation, lengths of events differ by multiples of these bytes


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


class Rows:
    """The rows of one request, submitted to the engine's thread.

    Args:
        finished: called once at the end, with the plan and the error, if there was one.
    """

    def __init__(
        self,
        model: ServedModel,
        loop: EngineLoop,
        plan: Plan,
        form: Format,
        options: StreamOptions,
        finished: Callable[[Plan, ApiError | None], None],
    ):
        self.model, self.loop, self.plan, self.form, self.options = model, loop, plan, form, options
        self.outputs = [RowOutput(model, plan, job, form.parser(), form.lists) for job in plan.jobs]
        self._finished = finished

    async def response(self) -> dict[str, Any]:
        """The response, once all rows have ended."""
        async for _ in advances(self.plan.jobs):
            pass
        rows = list(enumerate(self.outputs))
        choices = [self.form.choice(i, row, row.advance(len(row.job.tokens))) for i, row in rows]
        return self.form.response(choices, usage=usage_of(self.plan, self.outputs), truedraft=self._figures())

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events of a streamed response. Each has one choice; what belongs to the whole request, our own
        figures among it, goes with the last of them, and only a usage that was asked for has an event of its own."""
        await prompts_read([job for job in self.plan.jobs if "prompt_logprobs" in job.settings])
        begun = [False] * len(self.outputs)
        async for index, count in advances(self.plan.jobs):
            row = self.outputs[index]
            if row.finish_reason is not None:
                continue
            choices = [] if begun[index] else self.form.begin(index)
            begun[index] = True
            choices += self.form.choices(index, row, row.advance(count))
            ended = all(row.finish_reason is not None for row in self.outputs)
            for i, choice in enumerate(choices, 1):
                figures = {"truedraft": self._figures()} if ended and i == len(choices) else {}
                yield self._event(self.form.chunk([choice], **self._running_usage(), **figures))
        if self.options.include_usage:
            yield self._event(self.form.chunk([], usage=usage_of(self.plan, self.outputs)))
        yield DONE

    def _running_usage(self) -> dict[str, Any]:
        """The usage in an event with a choice: null where only that of the whole request was asked for."""
        if self.options.continuous_usage_stats:
            return {"usage": usage_of(self.plan, self.outputs)}
        return {"usage": None} if self.options.include_usage else {}

    def _event(self, chunk: dict[str, Any]) -> bytes:
        content = to_json(chunk)
        if self.options.include_obfuscation:
            content = to_json(chunk | {"obfuscation": token_hex(BLOCK)[: -len(content) % BLOCK]})
        return b"data: " + content + b"\n\n"

    def _figures(self) -> dict[str, Any]:
        return figures_of(self.model, self.plan)

    def end(self, error: ApiError | None) -> None:
        """Release the rows; called once, whatever happened."""
        self.loop.cancel(self.plan.jobs)
        self._finished(self.plan, error)


class Answer(Response):
    """Sends the response of some rows, streamed or whole, and cancels them when the client goes away.

    The status is known before the first byte: nothing is sent before the first tokens are there, so that errors of
    waiting rows (deadline, memory) have a status of their own. An error after that is an event of the stream.

    Args:
        write_seconds: seconds that a client may leave what was sent unread; then the connection is given up.
    """

    def __init__(self, rows: Rows, stream: bool, write_seconds: float):
        self.rows, self.stream, self.write_seconds = rows, stream, write_seconds
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError | None = ApiError(499, "the client has closed the connection", code="cancelled")
        outlet = Outlet(receive, send, self.write_seconds)
        try:
            error = await outlet.while_connected(self._streamed(outlet) if self.stream else self._whole(outlet), error)
        finally:
            self.rows.end(error)

    async def _whole(self, outlet: Outlet) -> ApiError | None:
        try:
            error, content = None, await self.rows.response()
        except ApiError as raised:
            error, content = raised, raised.body()
        await _begin(outlet, JSON, error)
        await outlet(part(to_json(content), more=False))
        return error

    async def _streamed(self, outlet: Outlet) -> ApiError | None:
        events, error, begun = self.rows.events(), None, False
        while error is None:
            try:
                event = await anext(events)
            except StopAsyncIteration:
                break
            except ApiError as raised:
                error, body = raised, to_json(raised.body())
                event = b"data: " + body + b"\n\n" if begun else body
            if not begun:
                await _begin(outlet, EVENTS, error)
                begun = True
            await outlet(part(event))
        await outlet(part(b"", more=False))
        return error


async def _begin(outlet: Outlet, headers: dict[str, str], error: ApiError | None) -> None:
    """Begin a response: with these headers, or as an error."""
    await outlet(head(200, headers) if error is None else head(error.status, JSON | error.headers))
