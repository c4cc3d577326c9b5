"""Sending to a client that may go away, or stop reading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

T = TypeVar("T")
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Outlet:
    """Sends to one client, and ends the work for it once it has gone.

    Args:
        receive, send: of the ASGI connection.
        write_seconds: seconds that the client may leave what was sent unread; then it counts as gone.
    """

    def __init__(self, receive: Receive, send: Send, write_seconds: float):
        self._receive, self._send, self._write_seconds = receive, send, write_seconds
        self._blocked_since: float | None = None

    async def __call__(self, message: Message) -> None:
        self._blocked_since = time.monotonic()
        await self._send(message)
        self._blocked_since = None

    async def while_connected(self, work: Coroutine[Any, Any, T], gone: T) -> T:
        """The result of `work`, which is cancelled where the client goes first; then `gone`."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._disconnected())
        try:
            while not (working.done() or watching.done() or self._abandoned):
                await asyncio.wait({working, watching}, timeout=self._write_seconds / 4, return_when="FIRST_COMPLETED")
            return working.result() if working.done() else gone
        finally:
            for task in (working, watching):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    @property
    def _abandoned(self) -> bool:
        since = self._blocked_since
        return since is not None and time.monotonic() - since > self._write_seconds

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def head(status: int, headers: dict[str, str]) -> Message:
    """The message that begins a response."""
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def part(content: bytes, more: bool = True) -> Message:
    """A part of a response's body; the last one has no more after it."""
    return {"type": "http.response.body", "body": content, "more_body": more}
