"""Tenants of one server: what one can see of another's text by its own usage figures, and who is served when."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

pytest.importorskip("fastapi")

import truedraft
from served import Running, running
from truedraft.loading import load
from truedraft.serve.keys import Keys

KEYS = {"key-of-ann-0123456789": "ann", "key-of-bob-0123456789": "bob"}
ANN, BOB = KEYS
SECRETS = ("one day, a little girl named lily went to the park", "tom had a red ball and his dog had a blue hat")
PROBES = (SECRETS[0], "one day, a little girl named lily went", "tom had a red ball", "one day")


def sent(server: Running, key: str, prompt: str, **settings: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "return_tokens": True, **settings}
    asked = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        return json.loads(response.read())  # type: ignore[no-any-return]


def seen(answer: dict[str, Any]) -> dict[str, Any]:
    """All that a response has but for its id and time."""
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


def probed(secret: str, prober: str, **settings: Any) -> list[dict[str, Any]]:
    """What a tenant sees of probes after Ann's requests with a secret."""
    fast = truedraft.accelerate(*load("nano"), draft="suffix+token-recycling", control="fixed")
    with running(fast, Keys(KEYS), max_rows=4, **settings) as server:
        for _ in range(2):
            sent(server, ANN, secret)
        return [seen(sent(server, prober, probe, seed=1)) for probe in PROBES]


def test_a_tenant_sees_nothing_of_another_by_accepted_cached_or_drafted_tokens() -> None:
    by_bob = [probed(secret, BOB) for secret in SECRETS]
    assert by_bob[0] == by_bob[1]
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for answer in by_bob[0][:1])
    by_ann = [probed(secret, ANN) for secret in SECRETS]  # the same figures can tell, within the namespace
    assert by_ann[0] != by_ann[1]
    assert by_ann[0][0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 5
    assert by_ann[0][0]["truedraft"]["passes"] < by_ann[1][0]["truedraft"]["passes"]
    texts = [[answer["choices"][0]["tokens"] for answer in found] for found in (*by_bob, *by_ann)]
    assert [[[t["id"] for t in tokens] for tokens in found] for found in texts[1:]] == [
        [[t["id"] for t in tokens] for tokens in texts[0]]
    ] * 3


def test_shared_prefixes_are_a_setting() -> None:
    cached = [
        found["usage"]["prompt_tokens_details"]["cached_tokens"]
        for found in probed(SECRETS[0], BOB, share_prefixes=True)
    ]
    assert cached[0] > 5


def test_reused_prefixes_change_no_text() -> None:
    fast = truedraft.accelerate(*load("nano"))
    texts: dict[int, list[str]] = {}
    for size in (0, 1 << 24):
        with running(fast, prefix_bytes=size) as server:
            texts[size] = []
            for seed in (1, 2):
                for prompt in (SECRETS[0], SECRETS[0] + " and saw", SECRETS[1], SECRETS[1] + SECRETS[0]):
                    answer = sent(server, ANN, prompt, temperature=0.9, seed=seed)
                    texts[size].append(answer["choices"][0]["text"])
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (size > 0)
    assert texts[0] == texts[1 << 24]
