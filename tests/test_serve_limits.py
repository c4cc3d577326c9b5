"""What the server refuses and survives: bad bodies, queues, deadlines, keys, clients that leave, engines that fail."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
import urllib.request
from urllib.error import HTTPError

import truedraft
from served import Running, running
from truedraft.accelerated import Accelerated
from truedraft.errors import Refused
from truedraft.loading import load
from truedraft.serve.config import ServeConfig, configured
from truedraft.serve.job import Job
from truedraft.serve.keys import Keys, read_keys
from truedraft.serve.queue import FairQueue

P = "one day, a little girl"
KEYS = Keys({"key-of-ann-0123456789": "ann", "key-of-bob-0123456789": "bob"})


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.fixture(scope="module")
def server(fast: Accelerated) -> Iterator[Running]:
    with running(fast, max_rows=2, max_waiting=2, idle_seconds=2.0) as made:
        yield made


def posted(
    server: Running, path: str, body: Any, key: str | None = None, data: bytes | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, JSON body and headers of a response."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    content = json.dumps(body).encode() if data is None else data
    asked = urllib.request.Request(server.url + path, content if body is not None else None, headers)
    try:
        with urllib.request.urlopen(asked, timeout=30) as response:
            return response.status, json.loads(response.read()), {k.lower(): v for k, v in response.headers.items()}
    except HTTPError as error:
        return error.code, json.loads(error.read()), {k.lower(): v for k, v in error.headers.items()}


def completed(server: Running, **body: Any) -> dict[str, Any]:
    status, answer, _ = posted(server, "/v1/completions", {"prompt": P, "max_tokens": 8, "temperature": 0, **body})
    assert status == 200, answer
    return answer


def still_serves(server: Running) -> None:
    assert completed(server)["choices"][0]["text"] == completed(server)["choices"][0]["text"] != ""
    until(lambda: server.server.loop.idle)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "", "add_special_tokens": False}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [4096]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": P, "n": 17}, 400, "n"),
        ({"prompt": P, "n": 0}, 400, "n"),
        ({"prompt": P, "n": True}, 400, "n"),
        ({"prompt": P, "max_tokens": 5000}, 400, "max_tokens"),
        ({"prompt": P, "max_tokens": -2}, 400, "max_tokens"),
        ({"prompt": P, "repetition_penalty": 1e-45}, 400, "repetition_penalty"),
        ({"prompt": P, "temperature": -1}, 400, "temperature"),
        ({"prompt": P, "temperature": 1e-9}, 400, "temperature"),
        ({"prompt": P, "top_p": 1.5}, 400, "top_p"),
        ({"prompt": P, "top_k": -2}, 400, "top_k"),
        ({"prompt": P, "seed": 2**64}, 400, "seed"),
        ({"prompt": P, "seed": 1.5}, 400, "seed"),
        ({"prompt": P, "stop": [""]}, 400, "stop"),
        ({"prompt": P, "stop": ["x" * 300]}, 400, "stop"),
        ({"prompt": P, "stop_token_ids": [99999]}, 400, "stop_token_ids"),
        ({"prompt": P, "logit_bias": {"5": 101}}, 400, "logit_bias"),
        ({"prompt": P, "logit_bias": {"five": 1}}, 400, "logit_bias"),
        ({"prompt": P, "logit_bias": {"9999": 1}}, 400, "logit_bias"),
        ({"prompt": P, "logprobs": 21}, 400, "logprobs"),
        ({"prompt": P, "best_of": 3}, 400, None),
        ({"prompt": P, "suffix": "end"}, 400, "suffix"),
        ({"prompt": P, "prompt_logprobs": 21}, 400, "prompt_logprobs"),
            ({"prompt": P, "prompt_logprobs": -1}, 400, "prompt_logprobs"),
            ({"prompt": P, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
        ({"prompt": P, "model": "gpt-4"}, 404, "model"),
        ({"prompt": P, "draft": "eagle3"}, 400, "draft"),
        ({"prompt": P, "draft": "none", "references": ["x"]}, 400, "draft"),
        ({"prompt": P, "references": [{"type": "file", "name": "../../etc/passwd"}]}, 404, "references"),
        ({"prompt": P, "references": [{"type": "response", "id": "cmpl-0"}]}, 404, "references"),
        ({"prompt": P, "references": ["x"] * 17}, 400, "references"),
        ({"prompt": P, "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"prompt": P, "min_tokens": 17}, 400, "min_tokens"),
        ({"prompt": P, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        ({"prompt": P, "prediction": {"type": "text", "content": "x"}}, 400, "prediction.type"),
        ({"prompt": P, "frequency_penalty": 3}, 400, "frequency_penalty"),
        ({"prompt": P, "colour": "red"}, 400, "colour"),
        ({"max_tokens": 3}, 400, "prompt"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(
    server: Running, body: dict[str, Any], status: int, param: str | None
) -> None:
    got, answer, _ = posted(server, "/v1/completions", body)
    error = answer["error"]
    assert (got, error["type"]) == (status, "not_found_error" if status == 404 else "invalid_request_error"), answer
    assert (error["param"] or "").startswith(param or ""), answer
    assert len(error["message"]) > 10 and "Traceback" not in error["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe{}", b'{"prompt": "\xff"}', b"[" * 100_000,
        b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "seed": 1e308}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "x"}{"prompt": "y"}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_request_get_one_sentence(server: Running, data: bytes) -> None:
    status, answer, headers = posted(server, "/v1/completions", {}, data=data)
    assert status == 400 and set(answer) == {"error"} and answer["error"]["message"]
    assert headers["x-content-type-options"] == "nosniff"


def test_long_bodies_and_unknown_paths(server: Running) -> None:
    data = b'{"prompt": "' + b"a" * (server.config.max_body_bytes + 1) + b'"}'
    with socket.create_connection(("127.0.0.1", server.port), 10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data))
        assert raw.recv(100).split()[1] == b"413"
    assert posted(server, "/v1/nothing", {})[0] == 404
    assert posted(server, "/v1/completions", None)[0] == 405
    still_serves(server)


def test_a_queue_has_a_bound_and_rows_begin_in_order(server: Running) -> None:
    def body(tokens: int) -> dict[str, Any]:
        return {"prompt": P, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    async def scenario() -> list[tuple[int, dict[str, Any], dict[str, str]]]:
        posts = [asyncio.to_thread(posted, server, "/v1/completions", body(800)) for _ in range(8)]
        return await asyncio.gather(*posts)

    answers = asyncio.run(scenario())
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 4
    for status, answer, headers in answers:
        if status == 429:
            assert int(headers["retry-after"]) >= 1 and answer["error"]["code"] == "queue_full"
    still_serves(server)


def test_a_deadline_ends_a_request_by_an_error_not_by_a_shorter_text(server: Running) -> None:
    body = {"prompt": P, "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "deadline": 0.05}
    status, answer, _ = posted(server, "/v1/completions", body)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    until(lambda: server.server.loop.idle)


def test_a_client_that_leaves_frees_its_row(server: Running) -> None:
    for stream in (True, False):
        body = {"prompt": P, "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": stream}
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", server.port), 10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            until(lambda: len(server.server.loop.running) == 1)
        before = time.monotonic()
        until(lambda: not server.server.loop.running)
        assert time.monotonic() - before < 5
    still_serves(server)


def test_silent_connections_are_closed_and_others_are_served(server: Running) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(50)]
    for i, raw in enumerate(silent):
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" if i % 2 else b"")
    completed(server)
    half = socket.create_connection(("127.0.0.1", server.port), 10)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    for raw in silent:
        raw.settimeout(10)
        assert raw.recv(10) == b""
        raw.close()
    half.settimeout(10)
    assert half.recv(100).split()[1] == b"408"
    half.close()
    still_serves(server)


def test_a_failed_pass_ends_its_requests_and_the_server_goes_on(fast: Accelerated) -> None:
    with running(fast, max_rows=2) as server:
        completed(server)
        target = server.server.loop.engine._target
        score, calls = target.score, 0

        def failing(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("the device is gone")
            return score(*args)

        server.server.loop.engine._engine._score = failing  # type: ignore[union-attr]
        status, answer, _ = posted(server, "/v1/completions", {"prompt": P, "max_tokens": 50, "temperature": 0})
        assert status == 500 and "the device is gone" in answer["error"]["message"]
        still_serves(server)


def test_pages_of_an_allowed_origin_may_use_openais_client(fast: Accelerated) -> None:
    with running(fast, max_rows=2, allow_origin=("https://a.example",)) as server:
        for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
            asked = urllib.request.Request(server.url + "/v1/chat/completions", method="OPTIONS")
            asked.add_header("Origin", origin)
            asked.add_header("Access-Control-Request-Method", "POST")
            asked.add_header("Access-Control-Request-Headers", "authorization,content-type,x-stainless-lang")
            try:
                headers = urllib.request.urlopen(asked, timeout=10).headers
            except HTTPError as error:
                headers = error.headers
            assert (headers["access-control-allow-origin"] == origin) == allowed
            assert not allowed or "x-stainless-lang" in headers["access-control-allow-headers"]


def test_ignore_eos_changes_nothing_before_the_end(server: Running) -> None:
    for prompt in (P, "one day<|end|> a cat"):  # the end token is that of padding, too, and begins every prompt
        texts = {completed(server, prompt=prompt, ignore_eos=given)["choices"][0]["text"] for given in (True, False)}
        assert len(texts) == 1


def test_a_client_that_waits_as_the_server_asks_is_served(fast: Accelerated) -> None:
    openai = pytest.importorskip("openai")
    long = {"prompt": P, "max_tokens": 800, "temperature": 0, "ignore_eos": True}
    with running(fast, max_rows=1, max_waiting=1) as server, ThreadPoolExecutor(2) as pool:
        loop = server.server.loop
        others = [pool.submit(posted, server, "/v1/completions", long)]
        until(lambda: len(loop.running) == 1)
        others.append(pool.submit(posted, server, "/v1/completions", {**long, "max_tokens": 8}))
        until(lambda: len(loop.queue) == 1)
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20)
        answer = api.completions.with_raw_response.create(model="nano", prompt=P, max_tokens=8, temperature=0)
        assert answer.retries_taken >= 1
        assert others[1].result()[1]["choices"][0]["text"].startswith(answer.parse().choices[0].text)
        assert others[0].result()[0] == 200


def test_a_draining_server_refuses_new_requests(fast: Accelerated) -> None:
    with running(fast, max_rows=2) as server:
        server.server.draining = True
        assert posted(server, "/health", None)[0] == 503
        status, answer, _ = posted(server, "/v1/completions", {"prompt": P})
        assert (status, answer["error"]["code"]) == (503, "ending")


def test_keys(fast: Accelerated) -> None:
    with running(fast, KEYS, max_rows=2) as server:
        for key in (None, "key-of-ann-012345678", "key-of-ann-01234567890", ""):
            status, answer, _ = posted(server, "/v1/completions", {"prompt": P}, key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert posted(server, "/v1/models", None)[0] == 401
        assert posted(server, "/health", None)[0] == 200
        mine = posted(server, "/v1/completions", {"prompt": P, "max_tokens": 4}, "key-of-ann-0123456789")[1]
        reference = {"prompt": P, "max_tokens": 4, "references": [{"type": "response", "id": mine["id"]}]}
        assert posted(server, "/v1/completions", reference, "key-of-ann-0123456789")[0] == 200
        assert posted(server, "/v1/completions", reference, "key-of-bob-0123456789")[0] == 404


def test_key_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nann=0123456789abcdef\n\nfedcba9876543210\n")
    file.chmod(0o600)
    keys = read_keys(file)
    assert keys.namespaces == ["ann", "default"] and keys.namespace("0123456789abcdef") == "ann"
    assert keys.namespace("0123456789abcdee") is None
    for text, mode, reason in (
        ("ann=short", 0o600, "at least 16"), ("a b=0123456789abcdef", 0o600, "namespace"), ("", 0o600, "no keys"),
        ("ann=0123456789abcdef", 0o604, "chmod 600"),
    ):  # fmt: skip
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(Refused, match=reason) as caught:
            read_keys(file)
        assert "0123456789abcdef" not in str(caught.value)
    monkeypatch.setenv("TRUEDRAFT_API_KEYS", "ann=0123456789abcdef,bob=fedcba9876543210")
    assert read_keys(None).namespaces == ["ann", "bob"]


def test_settings_of_a_file_and_of_options(tmp_path: Any) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'model = "nano"\nport = 9000\nprefix_bytes = "2G"\nallow_draft = ["suffix"]\n[reference]\nx = "a.txt"\n'
    )
    config = configured(file, {"port": 9001})
    assert (config.port, config.prefix_bytes, config.drafts) == (9001, 2 << 30, ("auto", "suffix", "none"))
    for text, reason in (
        ('model = "nano"\ncolour = 1', "colour is no setting"), ("model = 3", "model=3"), ("port = 1", "MODEL is"),
        ('model = "nano"\nport = 70000', "port=70000: give 0 to 65535"), ('model = "nano"\nport = true', "port=True"),
        ("model = ", "config"), ('model = "nano"\nlog_level = "loud"', "choose one of"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(Refused, match=reason):
            configured(file, {})
    with pytest.raises(Refused, match="max_rows=0"):
        ServeConfig(model="nano", max_rows=0)


def test_namespaces_take_turns() -> None:
    queue = FairQueue()
    for i in range(6):
        queue.add(Job([1] * 4, {}, 8, "ann", id=f"a{i}"))
    queue.add(Job([1] * 4, {}, 8, "bob", id="b0"))
    order = []
    while (job := queue.take()) is not None:
        order.append(job.id)
        queue.served(job.namespace, 8)
    assert order.index("b0") <= 1 and [name for name in order if name != "b0"] == [f"a{i}" for i in range(6)]
    assert len(queue) == 0


def test_a_head_without_end_is_cut_off(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                raw.sendall(b"X-Filler: " + b"a" * 4096 + b"\r\n")
    still_serves(server)
