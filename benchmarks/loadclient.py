"""A light HTTP client for loads: completions over asyncio streams, so that the client hardly costs what it measures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """One response. Times are seconds since the request was sent.

    sent: when it was sent, by `time.perf_counter`. arrivals: of events with text. texts: by choice. last: the final
        event.
    """

    status: int = 0
    sent: float = 0.0
    texts: dict[int, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts.get(0, "")

    def add(self, event: dict[str, Any]) -> bool:
        """Take over the texts of an event; whether there were any."""
        found = False
        for choice in event.get("choices", ()):
            text = _text(choice)
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + text
            found = found or bool(text)
        self.last = event
        return found

    @property
    def first(self) -> float:
        return self.arrivals[0] if self.arrivals else self.seconds


async def request(port: int, path: str, body: dict[str, Any], headers: str = "") -> Answer:
    """Send a request on a connection of its own and read the response, streamed or whole."""
    answer, data = Answer(), json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer.sent = start = time.perf_counter()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}{headers}Connection: close\r\n\r\n".encode() + data)
    try:
        answer.status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if answer.status != 200 or not body.get("stream"):
            answer.add(_whole(await reader.read()))
        else:
            async for line in reader:
                if line.startswith(b"data: {") and answer.add(json.loads(line[6:])):
                    answer.arrivals.append(time.perf_counter() - start)
    finally:
        answer.seconds = time.perf_counter() - start
        writer.close()
    return answer


def _whole(data: bytes) -> dict[str, Any]:
    start, end = data.find(b"{"), data.rfind(b"}")
    return json.loads(data[start : end + 1]) if start >= 0 else {}


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""


async def clients(port: int, bodies: list[list[dict[str, Any]]], path: str = "/v1/completions") -> list[list[Answer]]:
    """Several clients at once, each sending its bodies one after the other."""

    async def one(mine: list[dict[str, Any]]) -> list[Answer]:
        return [await request(port, path, body) for body in mine]

    return list(await asyncio.gather(*map(one, bodies)))


@contextmanager
def process(command: list[str], port: int, path: str = "/health", seconds: float = 120.0) -> Iterator[Any]:
    """A server of its own process, ready within the block; ended by SIGTERM. Its output is dropped."""
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                if asyncio.run(_get(port, path)) == 200:
                    break
            except OSError:
                pass
            if started.poll() is not None:
                raise RuntimeError(f"{command} ended with {started.returncode}")
            time.sleep(0.1)
        yield started
    finally:
        if started.poll() is None:
            os.kill(started.pid, signal.SIGTERM)
            started.wait(60)


async def _get(port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status
