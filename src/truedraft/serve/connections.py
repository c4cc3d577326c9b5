"""Connections: how many there may be, and how long one may be silent, have a head, or leave a response unread."""

from __future__ import annotations

import resource
from asyncio import TimerHandle
from contextlib import suppress
from math import inf
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from truedraft.serve.config import ServeConfig

SPARE = 256  # file descriptors that are kept for other uses than connections
LONGEST_HEAD = 64 << 10  # bytes of a request's line and headers


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, with bounds against slow and half-open clients; see `bounded`."""

    idle_seconds: ClassVar[float]
    write_seconds: ClassVar[float]
    max_connections: ClassVar[int]
    _deadline: TimerHandle | None = None  # until the head of a request, or the rest of an answered body, is complete
    _unread: TimerHandle | None = None  # while there is something that the client has not read
    _head: float = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            transport.set_write_buffer_limits(high=0)  # pause_writing is called whenever something is left unread
            self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is not None:  # the head is not complete yet
            self._head += len(data)
            if self._head > LONGEST_HEAD:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._await_head()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.more_body:  # answered before its body was complete: the rest is dropped, for a time
            self._await_head()
            self._head = -inf
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_reading()
        super().resume_writing()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_reading()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.idle_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._head = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _await_reading(self, left: int) -> None:
        """Close the connection where the client has read nothing of the bytes left when some time has passed."""

        def check() -> None:
            if (now := self.transport.get_write_buffer_size()) >= left:
                self.transport.abort()
            else:
                self._await_reading(now)

        self._unread = self.loop.call_later(self.write_seconds, check)

    def _stop_reading(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def bounded(config: ServeConfig) -> type[Protocol]:
    """The protocol with the bounds of a server's settings.

    A connection is closed that takes longer than `idle_seconds` until the head of a request is complete, or reads
    nothing of a response for `write_seconds`; and a new one at once, where there are `max_connections`.
    """
    bounds = {
        "idle_seconds": config.idle_seconds, "write_seconds": config.write_seconds,
        "max_connections": allowed(config.max_connections),
    }  # fmt: skip
    return type("BoundedProtocol", (Protocol,), bounds)


def allowed(most: int) -> int:
    """The connections that this process may have: file descriptors are raised to what the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = most + SPARE
    if soft != resource.RLIM_INFINITY and soft < need:
        raised = need if hard == resource.RLIM_INFINITY else min(need, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        return max(min(most, soft - SPARE), 1)
    return most
