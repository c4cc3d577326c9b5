"""Log-probabilities and single tokens in responses: they spell the text, and are those of plain forwards."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

import truedraft
from models import tiny
from served import Running, running
from tokenizers_for_tests import tokenizer_of
from truedraft import reading
from truedraft.loading import load
from truedraft.logprobs import TokenLogprobs
from truedraft.serve.listing import Listing
from truedraft.text.spelling import Spelling
from truedraft.text.token_text import token_text

KINDS = ["nano", "byte-level", "sentencepiece", "unigram", "wordpiece", "stories260K"]
PROMPT = "the day, one day"
CHAT = [{"role": "user", "content": PROMPT}]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "special tokens are shown": {"skip_special_tokens": False},
    "special tokens are likely, and hidden": {"bias": 6.0},
    "special tokens are likely, and shown": {"bias": 6.0, "skip_special_tokens": False},
    "an ordinary token ends the text": {"ends": True},
    "and is kept": {"ends": True, "include_stop_str_in_output": True},
}


def posted(server: Running, path: str, **body: Any) -> Any:
    """The response of a request: JSON, of a stream a list, of a refusal its error."""
    given = json.dumps({"model": "nano", **body}).encode()
    request = urllib.request.Request(server.url + path, given, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
    except urllib.error.HTTPError as error:
        return json.loads(error.read())["error"]
    if not body.get("stream"):
        return json.loads(text)
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Running, Any]]:
    """A server of a model with a tokenizer of this kind, and the tokenizer. All but `nano` have random weights."""
    tokenizer = tokenizer_of(request.param)
    if request.param == "nano":
        fast = truedraft.accelerate(*load("nano"))
    else:
        model = tiny("llama", torch.float32, vocabulary=len(tokenizer))
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        fast = truedraft.accelerate(model, tokenizer)
    with running(fast, chat_template="plain") as server:
        yield server, tokenizer


@pytest.fixture(scope="module")
def nano() -> Iterator[Running]:
    with running(truedraft.accelerate(*load("nano"))) as server:
        yield server


def settings_of(tokenizer: Any, name: str, seed: int) -> dict[str, Any]:
    given = dict(SETTINGS[name])
    bias, ends = given.pop("bias", 0.0), given.pop("ends", False)
    if bias:
        given["logit_bias"] = {str(token): bias for token in token_text(tokenizer).special}
    if ends:
        given["stop_token_ids"] = tokenizer.encode("a the day", add_special_tokens=False)
    return {"max_tokens": 14, "temperature": 1.0, "seed": seed, **given}


def streamed(events: list[Any], key: str) -> tuple[str, dict[str, list[Any]]]:
    """The text and the concatenated lists of `logprobs`, or `tokens`, of a stream with one choice."""
    text, lists = "", dict[str, list[Any]]()
    for event in events:
        choice = event["choices"][0]
        text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        found = choice.get(key)
        for name, entries in ({} if found is None else {"": found} if isinstance(found, list) else found).items():
            if isinstance(entries, list):
                lists.setdefault(name, []).extend(entries)
    return text, lists


def alike(one: Any, other: Any) -> bool:
    """Whether two parts of responses are equal, numbers up to rounding: not every runtime has the same bits twice."""
    if isinstance(one, float):
        return isinstance(other, float) and math.isclose(one, other, abs_tol=1e-3)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def check_completion(choice: dict[str, Any], start: int = 0) -> None:
    """The tokens of a completion spell its text; those that are a part of a character are named by their bytes."""
    found, text = choice["logprobs"], choice["text"]
    assert len({len(entries) for entries in found.values()}) == 1
    spelled = b""
    for token, at, top, value in zip(
        *(found[name] for name in ("tokens", "text_offset", "top_logprobs", "token_logprobs")), strict=True
    ):
        if token.startswith("bytes:"):
            spelled += token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")
        else:
            assert text[at:].startswith(token)
            spelled += token.encode()
        assert (value is None and top is None) or top[token] == value
    assert spelled.decode(errors="replace") == text


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_of_a_completion_spell_its_text(served: tuple[Running, Any], name: str) -> None:
    server, tokenizer = served
    for seed in range(4):
        body = {"prompt": PROMPT, "logprobs": 2, "return_tokens": True, **settings_of(tokenizer, name, seed)}
        choice = posted(server, "/v1/completions", **body)["choices"][0]
        check_completion(choice)
        assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
        assert len(choice["tokens"]) == len(choice["logprobs"]["tokens"])
        for token, top in zip(choice["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
            assert len(top) in (2, 3) and list(top.values()) == sorted(top.values(), reverse=True), token
        events = posted(server, "/v1/completions", **body, stream=True)
        assert alike(streamed(events, "logprobs"), (choice["text"], choice["logprobs"]))
        listed = [(token["id"], token["text"]) for token in streamed(events, "tokens")[1][""]]
        assert listed == [(token["id"], token["text"]) for token in choice["tokens"]]  # others may have been drafted


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bytes_of_a_chat_concatenate_to_its_content(served: tuple[Running, Any], name: str) -> None:
    server, tokenizer = served
    texts = token_text(tokenizer)
    for seed in range(4):
        body = {"messages": CHAT, "logprobs": True, "top_logprobs": 3, "return_tokens": True}
        body |= settings_of(tokenizer, name, seed)
        choice = posted(server, "/v1/chat/completions", **body)["choices"][0]
        entries, content = choice["logprobs"]["content"], choice["message"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == content
        for entry, token in zip(entries, choice["tokens"], strict=True):
            if token["id"] in texts.special:  # is named even where the text is shown without it
                assert entry["token"] == texts.added[token["id"]]
            assert len(entry["top_logprobs"]) == 3
            same = [other for other in entry["top_logprobs"] if other["token"] == entry["token"]]
            assert not same or {k: v for k, v in entry.items() if k != "top_logprobs"} in same
        events = posted(server, "/v1/chat/completions", **body, stream=True)
        assert alike(streamed(events, "logprobs"), (content, {"content": entries}))


def test_a_stop_string_cuts_its_tokens_too(served: tuple[Running, Any]) -> None:
    server, _ = served
    given = {"prompt": PROMPT, "logprobs": 0, "return_tokens": True, "max_tokens": 14, "seed": 5, "ignore_eos": True}
    whole = posted(server, "/v1/completions", **given)["choices"][0]["text"]
    for start in range(1, len(whole) - 3, 2):
        for keep in (False, True):
            body = {**given, "stop": whole[start : start + 3], "include_stop_str_in_output": keep}
            choice = posted(server, "/v1/completions", **body)["choices"][0]
            assert choice["finish_reason"] == "stop" and whole.startswith(choice["text"])
            assert "".join(token["text"] for token in choice["tokens"]) == choice["text"]
            check_completion(choice)
            events = posted(server, "/v1/completions", **body, stream=True)
            assert alike(streamed(events, "logprobs"), (choice["text"], choice["logprobs"]))


def test_the_emitted_token_is_always_among_the_likeliest(served: tuple[Running, Any]) -> None:
    server, _ = served
    body = {"prompt": PROMPT, "temperature": 2.0, "seed": 3, "max_tokens": 12, "return_tokens": True}
    for count in (0, 1, 20):
        choice = posted(server, "/v1/completions", **body, logprobs=count)["choices"][0]
        found = choice["logprobs"]
        sizes = {len(top) - count for top in found["top_logprobs"]}
        assert sizes == {1} if count == 0 else sizes <= {0, 1}
        for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert top[token] == value


def test_two_tokens_with_one_text_are_two_entries() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    texts = token_text(tokenizer)
    letter, byte = (tokenizer.convert_tokens_to_ids(piece) for piece in ("d", "<0x64>"))
    assert texts.bytes_of(letter) == texts.bytes_of(byte) == b"d"
    for own, other in ((letter, byte), (byte, letter)):
        spelling = Spelling(texts, context=[letter])
        spelling.add([own])
        for top in (((letter, -1.0), (byte, -2.0)), ((byte, -0.5), (letter, -3.0))):
            scored = TokenLogprobs(own, dict(top)[own], top)
            (found,) = Listing(texts).completion([(spelling.tokens[0], scored)])["top_logprobs"]
            assert found == {"d": dict(top)[own], f"token_id:{other}": dict(top)[other]}


def test_a_token_that_cannot_be_has_a_number_in_json() -> None:
    texts = token_text(tokenizer_of("nano"))
    spelling = Spelling(texts)
    spelling.add([70])
    listing = Listing(texts).completion([(spelling.tokens[0], TokenLogprobs(70, -math.inf, ((71, 0.0),)))])
    assert listing["token_logprobs"] == [-9999.0] and sorted(listing["top_logprobs"][0].values()) == [-9999.0, 0.0]


def test_tokenize_names_tokens_that_spell_the_text(served: tuple[Running, Any]) -> None:
    server, tokenizer = served
    for text in ("the day, one day", "a girl naïve café", " the\n 🙂"):
        found = posted(server, "/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
        ids, names = found["tokens"], found["token_strs"]
        assert len(names) == len(ids) and ids == tokenizer.encode(text, add_special_tokens=False)
        parts = [
            name.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")
            if name.startswith("bytes:") else name.encode()
            for name in names
        ]  # fmt: skip
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert b"".join(parts).decode().replace(" ", "") == decoded.replace(" ", "")
        assert posted(server, "/detokenize", tokens=ids)["prompt"] == tokenizer.decode(ids)
    if tokenizer.unk_token_id is None or token_text(tokenizer).concatenates:
        assert b"".join(parts).decode() == decoded


# ---------------------------------------------------------------- of prompts


def laws(model: Any, ids: list[int]) -> torch.Tensor:
    """(length - 1, V) log-probabilities of each token after the first, by one forward."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits
    return logits[0, :-1].float().log_softmax(-1)


def test_an_echo_has_the_log_probabilities_of_the_prompt(served: tuple[Running, Any]) -> None:
    server, tokenizer = served
    model = server.server.model.fast.model
    for prompt in (PROMPT, "the girl 🙂 said", tokenizer.encode(PROMPT)):
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0}
        choice = posted(server, "/v1/completions", **body)["choices"][0]
        ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        found = choice["logprobs"]
        assert choice["text"].startswith(text) and len(found["tokens"]) == len(ids) + 3
        check_completion(choice)
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        expected = laws(model, ids)
        for at, (token, law) in enumerate(zip(ids[1:], expected, strict=True), 1):
            assert found["token_logprobs"][at] == pytest.approx(float(law[token]), abs=2e-4)
            assert max(found["top_logprobs"][at].values()) == pytest.approx(float(law.max()), abs=2e-4)
        events = posted(server, "/v1/completions", **body, stream=True)
        assert alike(streamed(events, "logprobs"), (choice["text"], found))
        without = posted(server, "/v1/completions", **{**body, "echo": False})["choices"][0]
        assert choice["text"] == text + without["text"]


def test_a_prompt_alone_is_read_and_nothing_is_generated(nano: Running) -> None:
    model, tokenizer = nano.server.model.fast.model, nano.server.model.tokenizer
    prompts = ["one day, a cat", "tom said to his mother that he", "x"]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0, "n": 2}
    before = nano.server.metrics.counters["vllm:generation_tokens"]
    answer = posted(nano, "/v1/completions", **body)
    assert [choice["text"] for choice in answer["choices"]] == [prompt for prompt in prompts for _ in range(2)]
    assert answer["usage"]["completion_tokens"] == 0 and answer["truedraft"]["tokens"] == 0
    assert nano.server.metrics.counters["vllm:generation_tokens"] == before
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length"
        ids = tokenizer(prompts[choice["index"] // 2]).input_ids
        values = choice["logprobs"]["token_logprobs"]
        expected = laws(model, ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert values[1:] == pytest.approx(expected.tolist(), abs=2e-4) and len(values) == len(ids)
    (event, end) = posted(nano, "/v1/completions", prompt="x", echo=True, max_tokens=0, logprobs=0, stream=True)
    assert event["choices"][0]["text"] == "x" and end["choices"][0]["finish_reason"] == "length"
    longest = [70] * nano.server.model.max_model_len
    assert len(posted(nano, "/v1/completions", prompt=longest, max_tokens=0)["choices"]) == 1
    nothing = posted(nano, "/v1/completions", prompt="x", max_tokens=0)["choices"][0]
    assert nothing["text"] == "" and nothing["finish_reason"] == "length"


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_logprobs_are_listed_by_token_with_their_ranks(nano: Running, chat: bool) -> None:
    model, tokenizer = nano.server.model.fast.model, nano.server.model.tokenizer
    path, given = ("/v1/chat/completions", {"messages": CHAT}) if chat else ("/v1/completions", {"prompt": PROMPT})
    body: dict[str, Any] = {**given, "max_tokens": 2, "prompt_logprobs": 3, "temperature": 0}
    answer = posted(nano, path, **body)
    listed = answer["prompt_logprobs"] if chat else answer["choices"][0]["prompt_logprobs"]
    ids = posted(nano, "/tokenize", **given)["tokens"]
    assert listed[0] is None and len(listed) == len(ids)
    texts = token_text(tokenizer)
    for entry, token, law in zip(listed[1:], ids[1:], laws(model, ids), strict=True):
        likeliest = law.topk(3)
        expected = {str(t): float(v) for t, v in zip(*map(torch.Tensor.tolist, likeliest[::-1]), strict=True)}
        expected[str(token)] = float(law[token])
        assert {t: one["logprob"] for t, one in entry.items()} == pytest.approx(expected, abs=2e-4)
        for t, one in entry.items():
            assert one["decoded_token"] == texts.name(int(t))
            assert abs(one["rank"] - 1 - int((law > law[int(t)]).sum())) <= int(
                (law - law[int(t)]).abs().lt(1e-4).sum()
            )
    plain = posted(nano, path, **{k: v for k, v in body.items() if k != "prompt_logprobs"})
    assert "prompt_logprobs" not in str(plain)
    part = "message" if chat else "text"
    assert plain["choices"][0][part] == answer["choices"][0][part]


def test_a_kept_prefix_is_read_again_where_log_probabilities_are_asked_for(nano: Running) -> None:
    body = {"prompt": "the little bird said that it was a very good day", "max_tokens": 4, "temperature": 0}
    first = posted(nano, "/v1/completions", **body, echo=True, logprobs=1)
    kept = posted(nano, "/v1/completions", **body)
    assert kept["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    again = posted(nano, "/v1/completions", **body, echo=True, logprobs=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert alike(again["choices"], first["choices"])
    both = posted(nano, "/v1/completions", **body, echo=True, logprobs=1, prompt_logprobs=5)["choices"][0]
    assert alike(both["logprobs"], first["choices"][0]["logprobs"]) and len(both["prompt_logprobs"][1]) >= 5


def test_long_prompts_are_scored_in_pieces(nano: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "once upon a time there was a cat. " * 60, "echo": True, "max_tokens": 0, "logprobs": 1}
    whole = posted(nano, "/v1/completions", **body)["choices"]
    monkeypatch.setattr(reading, "SCORED", 1 << 18)  # bytes: 16 positions of nano's vocabulary
    assert alike(posted(nano, "/v1/completions", **body)["choices"], whole)
    texts = posted(nano, "/v1/completions", **{**body, "n": 3, "prompt": [body["prompt"], "a cat"]})["choices"]
    assert alike([choice["logprobs"] for choice in texts[:3]], [whole[0]["logprobs"]] * 3)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_cannot_be_listed_is_refused(nano: Running, body: dict[str, Any], param: str) -> None:
    error = posted(nano, "/v1/completions", **body)
    assert error["param"] == param and error["message"]
