"""The process in front of replicas, over replicas that answer what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi")

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from truedraft.errors import Refused
from truedraft.serve.config import ServeConfig
from truedraft.serve.front import Call, Front, Page, Reply, merged
from truedraft.serve.keys import Keys
from truedraft.serve.serving import Process

KEYS = Keys({"a-key-of-alice-1": "alice", "a-key-of-alice-2": "alice", "the-key-of-bob-01": "bob"})
EVENT = b'data: {"id":"cmpl-1","choices":[]}\n\n'
BODY = {"prompt": "once upon a time", "stream": True}


def begin(kind: bytes = b"text/event-stream", status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def part(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Scripted:
    """Replicas that answer every call with the same steps.

    steps: of an answer: a message to send, an exception to raise, or a number of seconds to wait.
    """

    def __init__(self, *steps: Any):
        self.steps = steps or (begin(), part(EVENT), part(b"", False))
        self.calls: list[tuple[Call, str]] = []
        self.closed = self.count = 0
        self.stopped = False

    async def send(self, call: Call, key: str) -> AsyncGenerator[Reply, None]:
        self.calls.append((call, key))
        try:
            for step in self.steps:
                if isinstance(step, dict):
                    yield Reply("second", [step])
                elif isinstance(step, Exception):
                    raise step
                else:
                    await asyncio.sleep(step)
        finally:
            self.closed += 1

    async def running(self) -> int:
        return self.count

    async def pages(self) -> Sequence[Page]:
        return [Page(1, "# TYPE x gauge\nx 2\n"), Page(0, "# TYPE x gauge\nx 1\n")]

    def stop(self) -> None:
        self.stopped = True


Answer = tuple[int, dict[str, str], bytes, bool]


def ask(
    front: Front,
    body: Any = None,
    path: str = "/v1/completions",
    key: str = "",
    leave: bool = False,
    slow: bool = False,
    method: str = "GET",
) -> Answer:
    """Status, headers and body of the answer, and whether it was ended.

    leave: the client goes after the first part. slow: it never reads.
    """
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {
        "type": "http",
        "method": method if body is None else "POST",
        "path": path,
        "headers": headers,
        "x": object(),
    }
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    given = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Any:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if slow:
            await asyncio.Event().wait()
        sent.append(message)
        if leave and message["type"] == "http.response.body":
            gone.set()

    asyncio.run(asyncio.wait_for(front(scope, receive, send), 20))
    if not sent:
        return 0, {}, b"", False
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return (
        sent[0]["status"], head, b"".join(message["body"] for message in sent[1:]), not sent[-1].get("more_body", False)
    )  # fmt: skip


def front(replicas: Scripted, keys: Keys | None = None, **settings: Any) -> Front:
    return Front(replicas, ServeConfig(model="nano", ray=True, replicas=2, **settings), keys or Keys({}))


def key_of(body: Any, key: str = "", keys: Keys | None = None) -> str:
    replicas = Scripted()
    ask(front(replicas, keys), body, key=key)
    return replicas.calls[0][1]


def test_messages_pass_unchanged_and_the_request_can_be_sent_elsewhere() -> None:
    replicas = Scripted(begin(b"text/plain", 418), part(b"ab"), part(b"c", False))
    assert ask(front(replicas), BODY) == (418, {"content-type": "text/plain"}, b"abc", True)
    call = replicas.calls[0][0]
    assert json.loads(call.body) == BODY and call.scope["path"] == "/v1/completions" and "x" not in call.scope


def test_a_namespace_has_one_key_whatever_its_prompts() -> None:
    alice = {
        key_of({"prompt": text}, key, KEYS) for text in ("a", "b") for key in ("a-key-of-alice-1", "a-key-of-alice-2")
    }
    bob = key_of({"prompt": "a"}, "the-key-of-bob-01", KEYS)
    assert len(alice) == 1 and bob not in alice


def chat(*turns: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    return {"messages": [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"prompt": "x" * 300 + "a"}, {"prompt": "x" * 300 + "b"}, True),
        ({"prompt": "a"}, {"prompt": "b"}, False),
        ({"prompt": [1] * 300 + [2]}, {"prompt": [1] * 300 + [3]}, True),
        ({"prompt": [1]}, {"prompt": [2]}, False),
        ({"prompt": ["a", "b"]}, {"prompt": "a"}, True),
        ({"prompt": [[1, 2]]}, {"prompt": [1, 2]}, True),
        (chat("be kind", "hello"), chat("be kind", "hello", "yes?", "more"), True),
        (chat("be kind", "hello"), chat("be kind", "bye"), False),
        (chat("be kind", "hello"), chat("be brief", "hello"), False),
        ({"messages": "no list"}, {"messages": ["no object"]}, False),
        ({"prompt": 7}, b"no json", True),
    ],
)
def test_without_keys_a_prompts_beginning_is_the_key(one: Any, other: Any, same: bool) -> None:
    assert (key_of(one) == key_of(other)) == same


def test_a_request_follows_the_response_that_it_refers_to() -> None:
    replicas = Scripted()
    server = front(replicas)
    ask(server, BODY)
    referring = {"prompt": "else", "references": ["text", {"type": "response", "id": "cmpl-1"}]}
    ask(server, referring)
    ask(server, {"prompt": "else", "references": [{"type": "response", "id": "cmpl-2"}]})
    assert [call.replica for call, _ in replicas.calls] == ["", "second", ""]


def test_the_id_of_a_whole_response_is_remembered_too() -> None:
    replicas = Scripted(begin(b"application/json"), part(b'{"id":"chatcmpl-9","object":"x"}', False))
    server = front(replicas)
    ask(server, {"prompt": "a"})
    ask(server, {"prompt": "b", "references": [{"type": "response", "id": "chatcmpl-9"}]})
    assert replicas.calls[1][0].replica == "second"


def test_a_replica_that_fails_before_its_answer_is_a_503() -> None:
    replicas = Scripted(RuntimeError("secret detail"))
    status, headers, body, ended = ask(front(replicas), BODY)
    assert status == 503 and ended and headers["retry-after"] == "1" and headers["x-content-type-options"] == "nosniff"
    assert json.loads(body)["error"]["code"] == "replica_failed" and b"secret" not in body


def test_a_replica_that_fails_in_a_stream_is_an_event_of_it() -> None:
    replicas = Scripted(begin(), part(EVENT), RuntimeError("secret detail"))
    status, _, body, ended = ask(front(replicas), BODY)
    assert status == 200 and ended and body.startswith(EVENT) and b"secret" not in body and b"[DONE]" not in body
    last = json.loads(body.removeprefix(EVENT).removeprefix(b"data: "))
    assert last["error"]["type"] == "overloaded_error"


def test_a_replica_that_fails_within_a_document_leaves_it_unended() -> None:
    replicas = Scripted(begin(b"application/json"), part(b'{"id":'), RuntimeError())
    with pytest.raises(RuntimeError):
        ask(front(replicas), BODY)


@pytest.mark.parametrize("how", [{"leave": True}, {"slow": True}])
def test_a_client_that_goes_or_does_not_read_ends_its_request(how: dict[str, bool]) -> None:
    replicas = Scripted(begin(), part(EVENT), 1000.0)
    server = front(replicas, write_seconds=0.1)
    ask(server, BODY, **how)
    assert replicas.closed == 1 and server.idle


def test_bodies_are_bounded_before_a_replica_sees_them() -> None:
    replicas = Scripted()
    status, _, body, _ = ask(front(replicas, max_body_bytes=1024), b" " * 1025)
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large" and not replicas.calls


def test_a_byte_order_mark_does_not_hide_a_request() -> None:
    found = set()
    for raw in (json.dumps(BODY).encode(), b"\xef\xbb\xbf" + json.dumps(BODY).encode()):
        replicas = Scripted(begin(b"text/plain"), part(b"", False))
        ask(front(replicas), raw)
        found.add(replicas.calls[0][1])
    assert found == {key_of(BODY)} != {key_of({})}


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/ping", "/metrics"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_front_answers_for_itself(path: str, method: str) -> None:
    replicas = Scripted()
    replicas.count = 2
    assert ask(front(replicas), path=path, method=method)[0] == 200 and not replicas.calls


def test_health_follows_the_replicas() -> None:
    replicas = Scripted()
    server = front(replicas)
    seen = []
    for replicas.count, server.draining in ((0, False), (1, False), (2, True)):
        status, _, body, _ = ask(server, path="/health")
        seen.append((status, json.loads(body)["status"], json.loads(body)["replicas"]["running"]))
    assert seen == [(503, "starting", 0), (200, "ready", 1), (503, "ending", 2)]


def test_while_requests_finish_new_ones_are_refused() -> None:
    replicas = Scripted()
    server = front(replicas)
    process = Process(_uvicorn_config(server), server)
    process.handle_exit(15, None)
    assert server.draining and ask(server, BODY)[0] == 503 and not replicas.calls
    assert ask(server, path="/v1/models")[0] == 200
    process.handle_exit(15, None)
    assert replicas.stopped and process.should_exit


def _uvicorn_config(app: Callable[..., Any]) -> Any:
    import uvicorn

    return uvicorn.Config(app, log_config=None)


def registry(count: int) -> CollectorRegistry:
    made = CollectorRegistry()
    labels = {"engine": "0", "model_name": "nano"}
    Counter("vllm:generation_tokens", "Tokens.", [*labels], registry=made).labels(**labels).inc(count)
    seconds = Histogram("vllm:e2e", "Seconds.", [*labels], buckets=(1, 2), registry=made).labels(**labels)
    for _ in range(count):
        seconds.observe(1.5)
    return made


def test_metrics_of_replicas_are_one_page_with_their_ranks() -> None:
    pages = [Page(rank, generate_latest(registry(rank + 2)).decode()) for rank in (1, 0)]
    text = merged(pages).decode()
    assert text.count("# TYPE vllm:generation_tokens_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counts = {
        s.labels["engine"]: s.value for s in families["vllm:generation_tokens"].samples if s.name.endswith("_total")
    }
    assert counts == {"0": 2, "1": 3}
    buckets = [
        s.value for s in families["vllm:e2e"].samples if s.labels == {"engine": "1", "model_name": "nano", "le": "2.0"}
    ]
    assert buckets == [3]
    assert ask(front(Scripted()), path="/metrics")[2].decode().splitlines()[-2:] == [
        'x{engine="0"} 1.0',
        'x{engine="1"} 2.0',
    ]


def test_replicas_without_ray_are_refused() -> None:
    with pytest.raises(Refused, match="--ray"):
        ServeConfig(model="nano", replicas=2)
