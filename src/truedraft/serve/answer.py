"""The answer to a request: one JSON document, or server-sent events; rows end when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from truedraft.serve.errors import ApiError
from truedraft.serve.formats import Format
from truedraft.serve.job import advances
from truedraft.serve.loop import EngineLoop
from truedraft.serve.model import ServedModel
from truedraft.serve.output import RowOutput, figures_of, usage_of
from truedraft.serve.protocol import StreamOptions
from truedraft.serve.settings import Plan

EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
log = logging.getLogger("truedraft.serve")


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
        self.outputs = [RowOutput(model, plan, job, form.parser()) for job in plan.jobs]
        self._finished = finished

    async def response(self) -> dict[str, Any]:
        """The response, once all rows have ended."""
        async for _ in advances(self.plan.jobs):
            pass
        rows = list(enumerate(self.outputs))
        choices = [self.form.choice(i, row, row.advance(len(row.job.tokens))) for i, row in rows]
        return self.form.response(choices, usage=usage_of(self.plan, self.outputs), truedraft=self._figures())

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events of a streamed response."""
        begun = [False] * len(self.outputs)
        async for index, count in advances(self.plan.jobs):
            row = self.outputs[index]
            if row.finish_reason is not None:
                continue
            choices = [] if begun[index] else self.form.begin(index)
            begun[index] = True
            choices += self.form.choices(index, row, row.advance(count))
            more = {"usage": usage_of(self.plan, self.outputs)} if self.options.continuous_usage_stats else {}
            for choice in choices:
                yield b"data: " + to_json(self.form.chunk([choice], **more)) + b"\n\n"
            if row.stopped and not row.job.finished:
                self.loop.stop_rows([row.job])
        usage = {"usage": usage_of(self.plan, self.outputs)} if self.options.include_usage else {}
        yield b"data: " + to_json(self.form.chunk([], **usage, truedraft=self._figures())) + b"\n\n"
        yield DONE

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

    def __init__(self, request: Request, rows: Rows, stream: bool, write_seconds: float):
        self.request, self.rows, self.stream, self.write_seconds = request, rows, stream, write_seconds
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: ApiError | None = ApiError(499, "the client has closed the connection", code="cancelled")
        try:
            work = self._streamed(send) if self.stream else self._whole(scope, receive, send)
            error = await unless_disconnected(receive, work, error)
        finally:
            self.rows.end(error)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        try:
            response, error = json_response(await self.rows.response()), None
        except ApiError as raised:
            response, error = error_response(raised), raised
        await response(scope, receive, send)
        return error

    async def _streamed(self, send: Send) -> ApiError | None:
        events, error, begun = self.rows.events(), None, False
        while True:
            try:
                event = await anext(events)
            except StopAsyncIteration:
                break
            except ApiError as raised:
                error, event = raised, b"data: " + to_json(raised.body()) + b"\n\n"
            if not begun:
                await self._begin(send, error)
                begun = True
                event = to_json(error.body()) if error is not None else event
            async with asyncio.timeout(self.write_seconds):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            if error is not None:
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return error

    async def _begin(self, send: Send, error: ApiError | None) -> None:
        headers = EVENTS if error is None else {"content-type": "application/json", **error.headers}
        await send({
            "type": "http.response.start", "status": 200 if error is None else error.status,
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        })  # fmt: skip


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, ApiError | None], gone: ApiError | None
) -> ApiError | None:
    """The result of `work`; it is cancelled where the client disconnects first, or leaves what was sent unread."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else gone
    except TimeoutError:
        return gone
    finally:
        for task in (working, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
