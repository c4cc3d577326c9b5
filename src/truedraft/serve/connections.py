"""Connections: how long one may be silent before its request, how long its head may be, and how many there may be."""

from __future__ import annotations

from asyncio import TimerHandle
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LONGEST_HEAD = 64 << 10  # bytes of a request's line and headers


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol over httptools, with bounds against slow and half-open clients; see `bounded`."""

    idle_seconds: ClassVar[float]
    max_connections: ClassVar[int]
    _deadline: TimerHandle | None = None  # until the head of a request is complete
    _head = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
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

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.idle_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._head = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bounded(idle_seconds: float, max_connections: int) -> type[Protocol]:
    """The protocol with bounds.

    Args:
        idle_seconds: that a connection may take until the head of a request is complete; then it is closed.
        max_connections: beyond them, a new connection is closed at once.
    """
    return type("BoundedProtocol", (Protocol,), {"idle_seconds": idle_seconds, "max_connections": max_connections})
