"""The server's API, driven by OpenAI's client: every answer is that of `generate` with the same settings."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

import truedraft  # noqa: E402
from api_requests import Expected, expected, random_body  # noqa: E402
from served import Running, running  # noqa: E402
from truedraft.accelerated import Accelerated  # noqa: E402
from truedraft.loading import load  # noqa: E402

CLIENTS = 15


@pytest.fixture(scope="module")
def plain() -> Accelerated:
    return truedraft.accelerate(*load("nano"), draft=None)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(truedraft.accelerate(*load("nano"))) as made:
        yield made


def client(server: Running, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def sent(server: Running, body: dict[str, Any], stream: bool) -> Expected:
    """The choices of a response, as OpenAI's client reads them."""
    api = client(server)
    known = {"model", "prompt", "messages", "seed", "max_tokens", "temperature", "top_p", "n", "stop", "logit_bias"}
    known |= {"frequency_penalty", "presence_penalty"} | ({"prediction"} if "messages" in body else set())
    given = {name: value for name, value in body.items() if name in known}
    extra = {name: value for name, value in body.items() if name not in known}
    create = api.chat.completions.create if "messages" in body else api.completions.create
    response = create(**given, stream=stream, extra_body=extra)
    n = body.get("n", 1)
    found = Expected([[] for _ in range(n)], [""] * n, [""] * n)
    for event in response if stream else [response]:
        for choice in event.choices:
            i = choice.index
            content = choice if "prompt" in body else choice.delta if stream else choice.message
            found.texts[i] += (content.text if "prompt" in body else content.content) or ""
            found.tokens[i] += [token["id"] for token in getattr(choice, "tokens", ())]
            found.reasons[i] = choice.finish_reason or found.reasons[i]
    return found


def compare(server: Running, plain: Accelerated, count: int, seed: int) -> int:
    """Send random requests, and compare all; returns how many."""
    chooser = random.Random(seed)
    bodies = [random_body(chooser, chat=i % 3 == 0) for i in range(count)]
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        answers = list(pool.map(lambda i: sent(server, bodies[i], i % 2 == 0), range(count)))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer == expected(plain, body), body
    return count


def test_every_answer_is_that_of_generate_under_load(server: Running, plain: Accelerated) -> None:
    assert compare(server, plain, 60, seed=1) == 60


@pytest.mark.slow
def test_two_thousand_answers(server: Running, plain: Accelerated) -> None:
    assert compare(server, plain, 2000, seed=2) == 2000
