"""A server of the embedded model in a thread, and the tokens of `generate` for the same request."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import uvicorn

from truedraft.accelerated import Accelerated
from truedraft.serve.app import Server, create_app
from truedraft.serve.config import ServeConfig
from truedraft.serve.connections import bounded
from truedraft.serve.keys import Keys


class Running:
    """A server on a free port of this machine.

    url: its root.
    server: what its routes share.
    """

    def __init__(self, fast: Accelerated, keys: Keys | None = None, **settings: Any):
        self.config = ServeConfig(**{"model": "nano", "prefix_bytes": 1 << 24, **settings})
        self.app = create_app(fast, self.config, keys)
        self.server: Server = self.app.state.server
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        protocol = bounded(self.config)
        self._uvicorn = uvicorn.Server(uvicorn.Config(self.app, http=protocol, ws="none", log_config=None))
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [listening]}, daemon=True)

    def start(self) -> Running:
        self._thread.start()
        while not (self._uvicorn.started and self.server.loop.is_alive()):
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(20)
        left, engine = len(self._uvicorn.server_state.connections), self.server.loop.is_alive()
        assert not self._thread.is_alive(), f"{left} connections are open, the engine's thread lives: {engine}"


@contextlib.contextmanager
def running(fast: Accelerated, keys: Keys | None = None, **settings: Any) -> Iterator[Running]:
    """A server for the block."""
    server = Running(fast, keys, **settings).start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def paused(server: Running) -> Iterator[None]:
    """No passes are made meanwhile."""
    begun, end = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        end.wait(20)

    server.server.loop.call(pause)
    assert begun.wait(20)
    try:
        yield
    finally:
        end.set()


def until(condition: Callable[[], Any]) -> Any:
    """The value of a condition, once it is true."""
    end = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def generated(fast: Accelerated, prompt: str, seed: int | None = None, **settings: Any) -> list[list[int]]:
    """The new tokens of plain decoding: `model.generate`, or with a seed `generate(seed=)` without drafts."""
    ids = torch.tensor([fast.tokenizer(prompt).input_ids])  # type: ignore[misc]
    settings = {"pad_token_id": 0, "attention_mask": torch.ones_like(ids), **settings}
    if seed is None:
        out = fast.model.generate(ids, tokenizer=fast.tokenizer, **settings)  # type: ignore[operator]
    else:
        out = fast.generate(ids, seed=seed, **settings)
    return [row[ids.shape[1] :].tolist() for row in out]
