"""The server on Ray with two replicas on one machine: texts, places, failures, and its end.

Texts are compared with `generate`. The log of each replica says which requests it ran.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

pytest.importorskip("ray")

import truedraft
from api_requests import expected, random_body
from served import running
from truedraft.accelerated import Accelerated
from truedraft.errors import Refused
from truedraft.loading import load
from truedraft.serve.ray import threads_each

pytestmark = pytest.mark.slow

ROWS = 2  # of a replica
TENANTS = [f"tenant{i}" for i in range(12)]
LONG = {"prompt": "once upon a time", "max_tokens": 1500, "ignore_eos": True, "draft": "none", "temperature": 0}
SHORT = {"prompt": "the little bird said", "max_tokens": 24, "temperature": 0}


class OnRay:
    """`truedraft serve --ray --replicas 2` as a process of its own."""

    def __init__(self, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        keys, self._log, self.memory = folder / "keys", folder / "log", folder / "outputs"
        keys.write_text("".join(f"{name}={self.key(name)}\n" for name in TENANTS))
        keys.chmod(0o600)
        command = [
            *(sys.executable, "-m", "truedraft", "serve", "nano", "--ray", "--replicas", "2", "--threads", "1"),
            *("--port", self.url.rpartition(":")[2], "--max-rows", str(ROWS), "--api-keys", str(keys)),
            *("--memory", str(self.memory)),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment.pop("RAY_ADDRESS", None)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, env=environment, cwd=folder, stderr=log, stdout=log)

    @staticmethod
    def key(name: str) -> str:
        return f"the-key-of-{name}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key(name)}"}

    def post(self, body: dict[str, Any], name: str = TENANTS[0]) -> Any:
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=self.headers(name), timeout=60)

    def text(self, body: dict[str, Any], name: str = TENANTS[0]) -> str:
        response = self.post(body, name)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def stream(self, body: dict[str, Any], name: str = TENANTS[0]) -> Any:
        return httpx.stream(
            "POST", f"{self.url}/v1/completions", json={**body, "stream": True}, headers=self.headers(name), timeout=60
        )

    def health(self) -> Any:
        return httpx.get(f"{self.url}/health", timeout=20).json()

    def metrics(self, name: str) -> dict[str, float]:
        """The values of a metric by replica, summed over other labels."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=20).text.splitlines():
            if match := re.match(rf'{name}\{{.*engine="(\d+)".*\}} (\S+)', line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def places(self, name: str) -> list[int]:
        """The processes of the replicas that ran the requests of a namespace, in the order of their ends."""
        return [int(pid) for pid in re.findall(rf"pid=(\d+).*namespace='{name}'", self.log)]

    def replicas(self) -> set[int]:
        """The processes of the replicas that run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {child.pid for child in children if "ServeReplica" in " ".join(child.cmdline())}


def until(reached: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.1)


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def joined(found: list[Any]) -> str:
    return "".join(choice["text"] for event in found for choice in event["choices"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    made = OnRay(tmp_path_factory.mktemp("ray"))
    try:

        def answers() -> bool:
            assert made.process.poll() is None, made.log
            try:
                return bool(made.health()["status"] == "ready")
            except httpx.HTTPError:
                return False

        until(answers, 120)
        yield made
    finally:
        made.process.terminate()
        try:
            made.process.wait(60)
        except subprocess.TimeoutExpired:
            made.process.kill()


@pytest.fixture(scope="module")
def plain() -> Accelerated:
    return truedraft.accelerate(*load("nano"), draft=None)


def text_of(plain: Accelerated, body: dict[str, Any]) -> str:
    return expected(plain, body).texts[0]


def test_a_namespace_stays_with_one_replica_and_both_are_used(server: OnRay) -> None:
    for name in TENANTS * 2:
        server.text(SHORT, name)
    until(lambda: all(len(server.places(name)) == 2 for name in TENANTS))
    places = [set(server.places(name)) for name in TENANTS]
    assert all(len(place) == 1 for place in places)
    assert set.union(*places) == server.replicas() and len(server.replicas()) == 2
    assert server.health() == {"status": "ready", "replicas": {"running": 2, "configured": 2}}
    counted = server.metrics("vllm:request_success_total")
    assert set(counted) == {"0", "1"} and sum(counted.values()) == 2 * len(TENANTS)


def test_an_earlier_response_is_found_by_its_namespace_alone(server: OnRay) -> None:
    first = server.post(SHORT, TENANTS[3]).json()
    body = {**SHORT, "references": [{"type": "response", "id": first["id"]}]}
    again = server.post(body, TENANTS[3]).json()
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert again["truedraft"]["accepted_tokens"] > 0
    assert server.post(body, TENANTS[4]).status_code == 404


def test_texts_are_those_of_one_process_and_of_generate_streamed_or_not(server: OnRay, plain: Accelerated) -> None:
    chooser = random.Random(5)
    bodies = [{**random_body(chooser), "n": 1} for _ in range(12)]
    with running(truedraft.accelerate(*load("nano"))) as single:
        for body in bodies:
            response = httpx.post(f"{single.url}/v1/completions", json=body, timeout=60)
            with server.stream(body) as stream:
                streamed = joined(list(events(stream.iter_lines())))
            texts = {text_of(plain, body), response.json()["choices"][0]["text"], server.text(body), streamed}
            assert len(texts) == 1, (body, texts)


def test_concurrent_clients_get_their_own_texts(server: OnRay, plain: Accelerated) -> None:
    chooser = random.Random(6)
    bodies = [{**random_body(chooser), "n": 1} for _ in range(40)]
    with ThreadPoolExecutor(10) as pool:
        texts = list(pool.map(lambda i: server.text(bodies[i], TENANTS[i % len(TENANTS)]), range(len(bodies))))
    assert texts == [text_of(plain, body) for body in bodies]


def test_requests_beyond_the_rows_of_a_replica_go_to_the_other(server: OnRay) -> None:
    name = TENANTS[5]
    body = {**LONG, "max_tokens": 1200, "draft": "none"}
    with ThreadPoolExecutor(3 * ROWS) as pool:
        texts = list(pool.map(lambda _: server.text(body, name), range(3 * ROWS)))
    assert len(set(texts)) == 1
    until(lambda: set(server.places(name)) == server.replicas())


def test_refusals_pass_through(server: OnRay) -> None:
    assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=20).status_code == 401
    refused = server.post({**SHORT, "frob": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "frob"
    late = server.post({**LONG, "deadline": 0.1})
    assert late.status_code == 504


def test_a_client_that_goes_frees_its_row(server: OnRay) -> None:
    before = server.metrics("vllm:request_success_total")
    with server.stream(LONG) as stream:
        received = events(stream.iter_lines())
        next(received)
        assert sum(server.metrics("vllm:num_requests_running").values()) == 1
    until(lambda: sum(server.metrics("vllm:num_requests_running").values()) == 0, 5)
    page = httpx.get(f"{server.url}/metrics", timeout=20).text
    assert re.search(r'vllm:request_success_total\{.*finished_reason="abort".*\} [1-9]', page)
    assert sum(server.metrics("vllm:request_success_total").values()) == sum(before.values()) + 1


def test_a_replica_that_is_killed_ends_its_streams_with_an_error_and_is_replaced(
    server: OnRay, plain: Accelerated
) -> None:
    name = TENANTS[0]
    ended = len(server.places(name))
    text = server.text(SHORT, name)
    until(lambda: len(server.places(name)) > ended)
    victim = server.places(name)[-1]
    with server.stream(LONG, name) as stream:
        received = events(stream.iter_lines())
        found = [next(received)]
        os.kill(victim, signal.SIGKILL)
        found += received
    error = found.pop()["error"]
    assert error["code"] == "replica_failed" and error["type"] == "overloaded_error"
    assert text_of(plain, LONG).startswith(joined(found))
    assert server.text(SHORT, name) == text == text_of(plain, SHORT)
    until(lambda: len(server.replicas()) == 2 and server.health()["replicas"]["running"] == 2, 90)
    assert victim not in server.replicas()
    assert server.text(SHORT, name) == text


def test_sigterm_lets_a_stream_finish_and_keeps_what_was_remembered(server: OnRay, plain: Accelerated) -> None:
    body = {**LONG, "max_tokens": 600}
    with server.stream(body) as stream:
        received = events(stream.iter_lines())
        found = [next(received)]
        replicas = server.replicas()
        server.process.terminate()
        until(lambda: "running requests finish" in server.log)
        assert server.post(SHORT).status_code == 503
        found += received
    assert joined(found) == text_of(plain, body)
    assert server.process.wait(60) == 0
    assert sorted(path.name for path in server.memory.parent.glob("outputs.*")) == ["outputs.0", "outputs.1"]
    assert not any(psutil.pid_exists(pid) for pid in replicas)


@pytest.mark.parametrize(
    ("cpus", "replicas", "threads"), [([8], 1, 8), ([8], 2, 4), ([8, 8], 3, 4), ([2], 2, 1), ([0, 5], 2, 2)]
)
def test_replicas_share_the_cpus_of_their_machines(cpus: list[int], replicas: int, threads: int) -> None:
    assert threads_each(cpus, replicas) == threads


def test_more_replicas_than_cpus_are_refused() -> None:
    with pytest.raises(Refused, match="replicas=3: the cluster has 2 CPUs"):
        threads_each([1, 1], 3)
