"""The server's API with a diffusion model: every answer is that of `generate`, which its own tests hold exact."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import pytest
import torch

pytest.importorskip("fastapi")

import truedraft
from served import Running, running
from truedraft import Refused
from truedraft.loading import load

PROMPTS = ["one day, a little girl", "tom and his mom went to", "def add(a, b):\n", "the cat"]


@pytest.fixture(scope="module")
def plain() -> Any:
    return truedraft.accelerate(*load("nano-diffusion"), draft=None)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    fast: Any = truedraft.accelerate(*load("nano-diffusion"), draft="ssd", control="fixed")
    with running(fast, model="nano-diffusion", max_rows=3, max_model_len=256, draft="ssd") as made:
        yield made


def post(server: Running, path: str = "completions", **body: Any) -> tuple[int, list[Any]]:
    """Status and the objects of an answer: one, or the events of a stream."""
    content, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    asked = urllib.request.Request(f"{server.url}/v1/{path}", content, kind)
    try:
        with urllib.request.urlopen(asked, timeout=60) as response:
            status, text = response.status, response.read().decode()
    except HTTPError as error:
        status, text = error.code, error.read().decode()
    if not body.get("stream"):
        return status, [json.loads(text)]
    *events, done = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    return status, list(map(json.loads, events))


def tokens_of(plain: Any, prompt: str, **settings: Any) -> list[list[int]]:
    ids = plain.tokenizer(prompt, return_tensors="pt").input_ids
    out = plain.generate(ids, eos_token_id=0, pad_token_id=0, **settings)[:, ids.shape[1] :].tolist()
    return [row[: row.index(0) + 1] if 0 in row else row for row in out]


def test_answers_are_those_of_generate(server: Running, plain: Any) -> None:
    """More requests than rows, each with settings of its own."""
    drawn: dict[str, Any] = dict(temperature=0.8, seed=5, top_p=0.9)
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for i, prompt in enumerate(PROMPTS):
        new = 9 + 7 * i
        settings = drawn | dict(do_sample=True, top_k=0, max_new_tokens=new, num_return_sequences=2)
        cases.append((dict(prompt=prompt, max_tokens=new, temperature=0), dict(max_new_tokens=new)))
        cases.append((dict(prompt=prompt, max_tokens=new, n=2, **drawn), settings | {"prompt": prompt}))
    cases.append((cases[0][0] | {"draft": "none"}, cases[0][1]))
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: post(server, return_tokens=True, **case[0])[1][0], cases))
    for (body, settings), answer in zip(cases, answers, strict=True):
        found = [[token["id"] for token in choice["tokens"]] for choice in answer["choices"]]
        settings.pop("prompt", None)
        assert found == tokens_of(plain, body["prompt"], **settings), body
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert reasons == ["stop" if row[-1] == 0 else "length" for row in found]
    assert answers[-1]["choices"][0]["text"] == answers[0]["choices"][0]["text"]


def test_a_stream_has_the_tokens_as_they_become_known_and_ends_at_stop_strings(server: Running, plain: Any) -> None:
    [expected] = tokens_of(plain, PROMPTS[0], max_new_tokens=40)
    text = plain.tokenizer.decode(expected, skip_special_tokens=True)
    stop = text[len(text) // 2 :][:4]
    message = [{"role": "user", "content": PROMPTS[0]}]
    across = PROMPTS[0][-2:] + text[:1]  # begins in the prompt
    assert across not in text
    for extra, whole in [({}, text), ({"stop": stop}, text[: text.index(stop)]), ({"stop": across}, text)]:
        body = dict(model="nano-diffusion", messages=message, max_tokens=40, temperature=0, stream=True, **extra)
        deltas = [event["choices"][0] for event in post(server, "chat/completions", **body)[1] if event["choices"]]
        pieces = [one["delta"].get("content") or "" for one in deltas]
        assert "".join(pieces) == whole and sum(map(bool, pieces)) > 1
        assert deltas[-1]["finish_reason"] == ("stop" if whole != text or expected[-1] == 0 else "length")


@pytest.mark.parametrize(
    "extra",
    [
        {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"logit_bias": {"5": 1}}, {"logprobs": 1},
        {"logprobs": 0}, {"prompt_logprobs": 0},
        {"min_tokens": 3}, {"response_format": {"type": "json_object"}}, {"references": ["a text"]},
        {"structured_outputs": {"regex": "a+"}}, {"draft": "suffix"},
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(server: Running, extra: dict[str, Any]) -> None:
    status, [answer] = post(server, prompt="one day", max_tokens=8, **extra)
    error, name = answer["error"], next(iter(extra))
    assert status == 400 and error["param"] == name and name in error["message"]


def test_prompts_and_lengths_that_do_not_fit(server: Running) -> None:
    _, [answer] = post(server, prompt=[5, 4096], max_tokens=4)
    assert answer["error"]["message"].startswith("the prompt of row 0 contains the mask token")
    status, [answer] = post(server, prompt="one day", max_tokens=300)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        assert b"truedraft:row_passes" in page.read()


def test_settings_of_a_server_that_have_no_meaning() -> None:
    fast: Any = truedraft.accelerate(*load("nano-diffusion"))
    with pytest.raises(Refused, match="allow_draft"):
        Running(fast, model="nano-diffusion", allow_draft=("suffix",))


def test_requests_leave_an_engine_when_they_are_aborted(plain: Any) -> None:
    fast: Any = truedraft.accelerate(*load("nano-diffusion"), control="fixed")
    engine = fast.engine(2, 64)
    ids = [fast.tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS[:3]]
    first, second, third = (engine.add_request(one, max_new_tokens=20, eos_token_id=None) for one in ids)
    engine.step()
    engine.abort_request(first)
    engine.abort_request(first)
    while engine.has_unfinished_requests():
        engine.step()
    assert first.finish_reason == "abort" and len(first.tokens) < 20
    for request, one in ((second, ids[1]), (third, ids[2])):
        assert request.finish_reason == "length"
        assert request.tokens == plain.generate(one, max_new_tokens=20, eos_token_id=None)[0, one.shape[1] :].tolist()
    with pytest.raises(Refused, match="max_tokens=64"):
        engine.add_request(torch.ones(1, 50, dtype=torch.long), max_new_tokens=20)
    engine.close()
    assert engine.target.cache is None
