"""What hostile clients and tenants try: each is answered or closed in time, and others are served meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

import truedraft
from served import Running, running
from test_serve_limits import KEYS, P, posted, until
from truedraft.accelerated import Accelerated
from truedraft.errors import Refused
from truedraft.loading import load
from truedraft.serve.app import Server
from truedraft.serve.config import ServeConfig
from truedraft.serve.errors import ApiError
from truedraft.serve.job import Job
from truedraft.serve.keys import Keys, read_keys
from truedraft.serve.loop import ADMITTING, EngineLoop
from truedraft.serve.model import RESPONSE_TOKENS, ServedModel
from truedraft.serve.protocol import ChatBody, CompletionBody
from truedraft.serve.security import check_origin
from truedraft.serve.serving import listen

MANY = 100_000


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.fixture(scope="module")
def server(fast: Accelerated) -> Iterator[Running]:
    settings = {"max_rows": 2, "idle_seconds": 1.0, "write_seconds": 1.0, "max_reference_tokens": 100}
    with running(fast, KEYS, **settings) as made:
        yield made


ANN = "key-of-ann-0123456789"


def raw(server: Running, head: bytes, body: bytes = b"") -> socket.socket:
    """A connection on which a request was sent."""
    made = socket.socket()
    made.settimeout(10)
    made.connect(("127.0.0.1", server.port))
    made.sendall(head.replace(b"\n", b"\r\n") + b"\r\n" + body)
    return made


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [-1] * MANY}), (CompletionBody, {"prompt": [[-1]] * MANY}),
        (CompletionBody, {"prompt": P, "stop_token_ids": [-1] * MANY}), (ChatBody, {"messages": [1] * MANY}),
        (CompletionBody, {"prompt": P, "references": [1] * MANY}), (CompletionBody, {"prompt": P, "stop": [1] * MANY}),
        (ChatBody, {"messages": [{}], "tools": [1] * MANY}),
        (CompletionBody, {"prompt": P, "prediction": {"type": "content", "content": [1] * MANY}}),
        (CompletionBody, {"prompt": P} | {f"k{i}": 1 for i in range(MANY)}),
        (CompletionBody, {"prompt": P, "prediction": {f"k{i}": 1 for i in range(MANY)}}),
        (CompletionBody, {"prompt": P, "logit_bias": {str(i): "x" for i in range(MANY)}}),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, dict) and len(value) < 9 else "",
)  # fmt: skip
def test_the_faults_of_a_body_are_not_all_collected(kind: type[CompletionBody], body: dict[str, Any]) -> None:
    """One error each would take a second per 100 kB of body, in the event loop, and a gigabyte per megabyte."""
    with pytest.raises((ValidationError, ApiError)) as caught:
        kind.model_validate(body)
    if isinstance(caught.value, ValidationError):
        assert caught.value.error_count() < 10


def test_no_body_is_read_without_a_key(server: Running) -> None:
    for path in ("v1/completions", "v1/chat/completions", "tokenize", "detokenize"):
        head = f"POST /{path} HTTP/1.1\nHost: x\nContent-Length: 1000000\n".encode()
        with raw(server, head, b"{") as connection:
            assert connection.recv(100).split()[1] == b"401"


def test_an_answered_request_whose_body_never_ends_is_closed(server: Running) -> None:
    with raw(server, b"POST /v1/completions HTTP/1.1\nHost: x\nContent-Length: 1000000\n") as connection:
        assert b"401" in connection.recv(10_000)
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < start + 8:  # each byte ended the time that a connection may be silent
                connection.sendall(b" ")
                time.sleep(0.05)


def test_a_response_that_is_not_read_is_dropped(server: Running) -> None:
    """Rows are freed, and the connection with what was to be sent, streamed or not."""
    connections = server._uvicorn.server_state.connections
    for stream in (True, False):
        body = {"prompt": P, "n": 4, "max_tokens": 60, "logprobs": 20, "temperature": 0, "stream": stream}
        data = json.dumps(body | {"return_tokens": True}).encode()
        until(lambda: not connections)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", server.port))
            until(lambda: bool(connections))
            ((transport,),) = [[each.transport for each in connections]]
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            head = f"POST /v1/completions HTTP/1.1\nHost: x\nAuthorization: Bearer {ANN}\nContent-Length: {len(data)}\n"
            client.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + data)
            until(lambda: transport.get_write_buffer_size() > 0, 20)
            until(lambda: not connections and server.server.loop.idle, 10)


def test_rows_that_can_never_wait_are_refused_for_good(server: Running) -> None:
    body = {"prompt": [P] * 64, "n": 16, "max_tokens": 1}
    status, answer, _ = posted(server, "/v1/completions", body, ANN)
    assert (status, answer["error"]["param"]) == (400, "n")


def test_references_stop_strings_and_methods(server: Running) -> None:
    for body, param in (
        ({"references": ["a cat " * 100]}, "references"),
        ({"prediction": {"type": "content", "content": "a cat " * 30}, "references": ["a dog " * 30]}, "references"),
        ({"stop": ["x" * 100] * 3}, "stop"),
    ):
        status, answer, _ = posted(server, "/v1/completions", {"prompt": P, **body}, ANN)
        assert (status, answer["error"]["param"]) == (400, param), answer
    status, _, headers = posted(server, "/v1/completions", None, ANN)
    assert (status, headers["allow"]) == (405, "POST")


def test_responses_are_remembered_up_to_a_bound(fast: Accelerated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.serve.model.RESPONSE_TOKENS", 100)
    model = ServedModel(fast, ServeConfig(model="nano"))
    for i in range(5):
        model.remember("ann", f"r{i}", [i] * 40)
    model.remember("bob", "r0", [9] * 100)
    assert [model.response("ann", f"r{i}") for i in range(5)] == [None] * 3 + [[3] * 40, [4] * 40]
    assert model.response("bob", "r0") == [9] * 100 and model.response("eve", "r0") is None and RESPONSE_TOKENS > 1000


def test_a_row_begins_as_soon_as_the_last_one_ends(fast: Accelerated) -> None:
    """Rows that waited while the only running one ended began a second late."""
    with running(fast, max_rows=1) as server:
        events: list[int] = []

        def send() -> None:
            posted(server, "/v1/completions", {"prompt": P, "max_tokens": 2})

        threads = [threading.Thread(target=send) for _ in range(4)]
        loop = server.server.loop
        wait = loop._wake.wait

        def waiting(timeout: float | None = None) -> bool:
            events.append(len(loop.queue))
            return wait(timeout)

        loop._wake.wait = waiting  # type: ignore[method-assign]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(events), "the engine's thread slept while rows waited"


class Nothing:
    """An observer that does nothing."""

    def advanced(self, *args: Any) -> None: ...

    def ended(self, job: Job) -> None: ...

    def passed(self, *args: Any) -> None: ...


def test_an_engine_that_cannot_be_made_again_ends_all_rows(fast: Accelerated) -> None:
    """Rows waited for ever, and new ones were taken."""
    made: list[Any] = []

    def make() -> Any:
        if made:
            raise Refused("no memory is left")
        made.append(fast.engine(1, 256))
        return made[0]

    loop = EngineLoop(make, Nothing(), max_waiting=8)
    jobs = [Job(fast.tokenizer(P).input_ids, {"draft": fast.drafter}, 8) for _ in range(3)]  # type: ignore[misc]

    def failing(*args: Any) -> Any:
        raise RuntimeError("the device is gone")

    made[0]._engine._score = failing
    loop.submit(jobs)
    loop.start()
    loop.join(20)
    assert not loop.is_alive() and [job.error.status for job in jobs if job.error] == [500, 503, 503]
    with pytest.raises(ApiError, match="ending"):
        loop.submit(jobs)


def test_rows_that_run_do_not_wait_until_many_others_are_added(fast: Accelerated, monkeypatch: Any) -> None:
    """To add a row takes a millisecond and more: streams stalled while a burst of requests was taken in."""
    loop = EngineLoop(lambda: fast.engine(16, 256), Nothing(), max_waiting=32)
    add = loop.engine.add_request

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(ADMITTING / 2)
        return add(*args, **kwargs)

    monkeypatch.setattr(loop.engine, "add_request", slow)
    jobs = [Job(fast.tokenizer(P).input_ids, {"draft": None}, 30) for _ in range(13)]  # type: ignore[misc]
    loop.submit(jobs[:1])
    while not jobs[0].tokens:
        loop._turn()
    loop.submit(jobs[1:])
    emitted = len(jobs[0].tokens)
    loop._turn()
    loop._turn()
    assert len(loop.queue) >= 8 and len(jobs[0].tokens) > emitted
    while not all(job.finished for job in jobs):
        loop._turn()
    assert len({tuple(job.tokens) for job in jobs}) == 1
    loop.engine.close()


def test_a_memory_that_cannot_be_written_is_refused_at_the_start(fast: Accelerated, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere" / "m.tdm", tmp_path / "file" / "m.tdm"):
        with pytest.raises(Refused, match="memory"):
            Server(fast, ServeConfig(model="nano", memory=path, prefix_bytes=0), Keys({})).restore()
    whole = Server(fast, ServeConfig(model="nano", memory=tmp_path / "m.tdm", prefix_bytes=0), Keys({}))
    whole.restore()
    whole.restore()
    assert (tmp_path / "m.tdm").stat().st_size > 0


def test_hosts_that_can_be_bound_and_those_that_are_refused() -> None:
    with listen(ServeConfig(model="nano", port=0)) as first:
        port = first.getsockname()[1]
        settings: list[dict[str, Any]] = [
            {"port": port},
            {"host": ""},
            {"host": "\u00e9" * 80},
            {"host": "203.0.113.7"},
        ]
        for given in settings:
            with pytest.raises(Refused, match="host="):
                listen(ServeConfig(model="nano", **given))


def test_keys_that_contradict_or_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, reason in (("ann=0123456789abcdef,bob=0123456789abcdef", "ann"), (",", "no keys"), (" ", "no keys")):
        monkeypatch.setenv("TRUEDRAFT_API_KEYS", text)
        with pytest.raises(Refused, match=reason) as caught:
            read_keys(None)
        assert "0123456789" not in str(caught.value)
    monkeypatch.setenv("TRUEDRAFT_API_KEYS", "")
    assert not read_keys(None)


@pytest.mark.parametrize(
    ("origin", "host", "bound", "status"),
    [
        (None, "localhost:8000", "127.0.0.1", 200), ("http://localhost:8000", "localhost:8000", "127.0.0.1", 200),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "127.0.0.1", 200), ("http://[::1]:8000", "[::1]:8000", "::1", 200),
        ("https://there.example", "localhost:8000", "127.0.0.1", 403), ("null", "localhost:8000", "127.0.0.1", 403),
        ("http://localhost:9000", "localhost:8000", "127.0.0.1", 403), ("http://[", "localhost:8000", "127.0.0.1", 403),
        ("http://rebound.example:8000", "rebound.example:8000", "127.0.0.1", 403),
        ("http://ours.example:8000", "ours.example:8000", "0.0.0.0", 200),
        ("https://listed.example", "localhost:8000", "127.0.0.1", 200),
    ],
)  # fmt: skip
def test_pages_of_other_sites_may_not_use_a_local_server(
    origin: str | None, host: str, bound: str, status: int
) -> None:
    """A browser sends any page's POST to a server on its machine, and shows it the answer where names are rebound."""
    config = ServeConfig(model="nano", host=bound, allow_origin=("https://listed.example",))
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    if status == 200:
        check_origin(headers, config)
        return
    with pytest.raises(ApiError, match="--allow-origin") as caught:
        check_origin(headers, config)
    assert caught.value.status == status


def test_origins_count_where_there_are_no_keys(server: Running, fast: Accelerated) -> None:
    def status(of: Running) -> int:
        head = b"POST /v1/completions HTTP/1.1\nHost: localhost\nOrigin: https://there.example\nContent-Length: 2\n"
        with raw(of, head, b"{}") as connection:
            return int(connection.recv(100).split()[1])

    assert status(server) == 401
    with running(fast, max_rows=1) as open_server:
        assert status(open_server) == 403
