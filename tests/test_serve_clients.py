"""The loops over streams that the documentation of clients shows, unchanged, against a server."""

from __future__ import annotations

import contextlib
import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

import truedraft  # noqa: E402
from served import Running, generated, running  # noqa: E402
from truedraft.accelerated import Accelerated  # noqa: E402
from truedraft.loading import load  # noqa: E402

PROMPT = "one day, a little girl named lily"
MESSAGES = [{"role": "user", "content": PROMPT}]
TOKENS = 12


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.fixture(scope="module")
def text(fast: Accelerated) -> str:
    """What `model.generate` has for the prompt."""
    (ids,) = generated(fast, PROMPT, max_new_tokens=TOKENS, do_sample=False)
    return str(fast.tokenizer.decode(ids))  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def server(fast: Accelerated) -> Iterator[Running]:
    with running(fast) as made:
        yield made


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def given(server: Running) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}


def test_openai_prints_the_content_of_every_chunk(client: Any, given: dict[str, Any], text: str) -> None:
    stream = client.chat.completions.create(model="nano", **given, stream=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for chunk in stream:
            if chunk.choices[0].delta.content is not None:
                print(chunk.choices[0].delta.content, end="")
    assert printed.getvalue() == text


def test_openai_prints_the_text_of_every_completion_chunk(client: Any, text: str) -> None:
    stream = client.completions.create(model="nano", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for chunk in stream:
            print(chunk.choices[0].text, end="")
    assert printed.getvalue() == text


def test_openai_collects_messages_as_its_cookbook_does(client: Any, given: dict[str, Any], text: str) -> None:
    stream = client.chat.completions.create(model="nano", **given, stream=True, stream_options={"include_usage": True})
    collected, usages = [], []
    for chunk in stream:
        if chunk.usage is None:
            collected.append(chunk.choices[0].delta)
        else:
            assert not chunk.choices
            usages.append(chunk.usage)
    assert "".join(delta.content or "" for delta in collected) == text
    assert [usage.completion_tokens for usage in usages] == [TOKENS]


def test_openai_accumulates_a_stream(client: Any, given: dict[str, Any], fast: Accelerated) -> None:
    settings = {**given, "max_tokens": 60, "stop": ["."]}  # its helper raises an error where an answer is cut by length
    (ids,) = generated(fast, PROMPT, max_new_tokens=60, do_sample=False)
    text = fast.tokenizer.decode(ids).split(".")[0]  # type: ignore[union-attr]
    with client.chat.completions.stream(model="nano", **settings, logprobs=True, top_logprobs=2) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == text
    spelled = final.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in spelled).decode() == text


def test_openai_streams_several_choices(client: Any, given: dict[str, Any]) -> None:
    texts, order = ["", "", ""], [list[str](), list[str](), list[str]()]
    settings = {**given, "temperature": 1.0, "seed": 5, "n": 3}
    for chunk in client.chat.completions.create(model="nano", **settings, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        kinds = ["role"] * bool(choice.delta.role) + ["finish"] * bool(choice.finish_reason)
        order[choice.index] += kinds or ["content"]
    whole = client.chat.completions.create(model="nano", **settings)
    assert texts == [choice.message.content for choice in whole.choices]
    for kinds in order:
        assert kinds[0] == "role" and kinds[-1] == "finish" and {*kinds[1:-1]} <= {"content"}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": MESSAGES}),
    "chat with tokens": ("chat/completions", {"messages": MESSAGES, "return_tokens": True, "logprobs": True}),
    "several choices": ("chat/completions", {"messages": MESSAGES, "n": 3}),
    "completion": ("completions", {"prompt": PROMPT}),
    "several prompts": ("completions", {"prompt": [PROMPT, "a cat"], "echo": True, "logprobs": 1}),
    "the prompt alone": ("completions", {"prompt": PROMPT, "echo": True, "max_tokens": 0}),
    "a stop string": ("completions", {"prompt": PROMPT, "stop": "e", "n": 2}),
}
OPTIONS: list[dict[str, bool]] = [
    {}, {"include_usage": True}, {"continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
@pytest.mark.parametrize("name", REQUESTS)
def test_every_event_has_a_choice_but_for_a_usage_that_was_asked_for(
    server: Running, name: str, options: dict[str, bool]
) -> None:
    path, given = REQUESTS[name]
    body = {"model": "nano", "max_tokens": TOKENS, "temperature": 0, **given}
    request = {**body, "stream": True, "stream_options": options} if options else {**body, "stream": True}
    lines = [line for line in sent(server, path, request).splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    whole = json.loads(sent(server, path, body))
    if options.get("include_usage"):
        last = events.pop()
        assert last["choices"] == [] and last["usage"] == whole["usage"] and "truedraft" not in last
    assert all(len(event["choices"]) == 1 for event in events)
    assert ["truedraft" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert (
        events[-1]["choices"][0]["finish_reason"] and events[-1]["truedraft"]["tokens"] == whole["truedraft"]["tokens"]
    )
    counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    if options.get("continuous_usage_stats"):
        assert len(counts) == len(events) and counts == sorted(counts)
        assert counts[-1] == whole["usage"]["completion_tokens"]
    else:
        assert counts == [] and all(("usage" in event) == bool(options) for event in events)


def sent(server: Running, path: str, body: dict[str, Any]) -> str:
    """The body of a response."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


@pytest.mark.filterwarnings("default")  # of the client itself
def test_litellm_collects_the_deltas(
    server: Running, given: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # not to be fetched
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    response = litellm.completion(
        model="openai/nano", api_base=f"{server.url}/v1", api_key="none", **given, stream=True
    )
    chunks = []
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for part in response:
            print(part.choices[0].delta.content or "", end="")
            chunks.append(part)
    assert printed.getvalue() == text
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == text and built.choices[0].finish_reason == "length"


@pytest.mark.filterwarnings("default")
def test_langchain_streams_and_adds_chunks(server: Running, text: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    settings: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "max_tokens": TOKENS}
    llm = langchain.ChatOpenAI(model="nano", temperature=0, **settings)
    full = None
    for chunk in llm.stream(PROMPT):
        full = chunk if full is None else full + chunk
    assert full is not None and full.content == text


@pytest.mark.filterwarnings("default")
def test_instructor_streams_partial_objects(client: Any) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed")
    pydantic = pytest.importorskip("pydantic")
    kind = pydantic.create_model("Cat", age=(int, ...), tame=(bool, ...))
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        patched.chat.completions.create_partial(
            model="nano", messages=MESSAGES, response_model=kind, max_tokens=200, seed=1
        )
    )
    assert isinstance(parts[-1].age, int) and isinstance(parts[-1].tame, bool)
