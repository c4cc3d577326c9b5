"""What clients of other servers send, by the served API: an answer where it is harmless, a sentence where it is not.

The texts are compared with `generate` for the parameters that a request means.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import jsonschema
import pytest

pytest.importorskip("fastapi")
import truedraft
from api_requests import PROMPTS, expected
from served import Running, running
from truedraft.accelerated import Accelerated
from truedraft.loading import load
from truedraft.serve.errors import ApiError
from truedraft.serve.peers import ABSENT, ABSENT_IN_CHAT
from truedraft.serve.protocol import NO_EFFECT, ChatBody, CompletionBody

P = PROMPTS[0]
USER = {"role": "user", "content": P}
SCHEMA = {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip
THINKING = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def plain() -> Accelerated:
    return truedraft.accelerate(*load("nano"), draft=None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("peers") / "template"
    template.write_bytes(b"\xef\xbb\xbf" + THINKING.encode())
    with running(truedraft.accelerate(*load("nano"), control="fixed"), chat_template=str(template)) as made:
        yield made


def sent(server: Running, path: str, body: Any = None, method: str | None = None, data: bytes | None = None) -> Any:
    """The status, and the body of an answer."""
    content = data if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, content, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            status, text = answer.status, answer.read()
    except HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text else None


def completed(server: Running, **body: Any) -> Any:
    status, answer = sent(server, "/v1/completions", {"prompt": P, "max_tokens": 12, "temperature": 0, **body})
    assert status == 200, (body, answer)
    return answer


def text_of(server: Running, **body: Any) -> str:
    return str(completed(server, **body)["choices"][0]["text"])


def prompt_of(server: Running, messages: list[dict[str, Any]], **more: Any) -> str:
    """The text of a prompt, as the server tokenizes it."""
    status, answer = sent(server, "/tokenize", {"messages": messages, **more})
    assert status == 200, answer
    return str(server.server.model.tokenizer.decode(answer["tokens"]))


# ---------------------------------------------------------------- numbers and nulls


@pytest.mark.parametrize("number", [float, lambda value: value], ids=["floats", "integers"])
def test_integers_may_be_written_as_floats(server: Running, plain: Accelerated, number: Any) -> None:
    body = {"prompt": P, "max_tokens": 12, "temperature": 1.0, "seed": 7, "top_k": 40, "n": 2, "min_tokens": 3}
    correct = expected(plain, body)
    given = {k: number(v) if isinstance(v, int) else v for k, v in body.items()}
    lists = {"stop_token_ids": [number(4000)], "logprobs": number(2), "best_of": number(2)}
    answer = completed(server, **given, **lists)
    assert [choice["text"] for choice in answer["choices"]] == correct.texts
    ids = plain.tokenizer(P).input_ids  # type: ignore[misc]
    body |= {"prompt": P, "logit_bias": {"3002": 5.0}}
    answer = completed(server, **{**given, "prompt": list(map(number, ids)), "logit_bias": {f"{number(3002)}": 5}})
    assert [choice["text"] for choice in answer["choices"]] == expected(plain, body).texts


@pytest.mark.parametrize(
    "name", ["max_tokens", "top_k", "n", "seed", "min_tokens", "logprobs", "best_of", "max_completion_tokens"]
)
def test_other_floats_are_refused(server: Running, name: str) -> None:
    chat = name == "max_completion_tokens"
    body = {"messages": [USER]} if chat else {"prompt": P}
    for value in (8.5, "8", True, 1e300):
        status, answer = sent(server, f"/v1/{'chat/' * chat}completions", {**body, name: value})
        assert (status, answer["error"]["param"]) == (400, name), (value, answer)
        assert answer["error"]["message"].startswith(f"{name}=")
        assert value == 1e300 or "valid integer" in answer["error"]["message"]


def test_nulls_are_as_good_as_nothing_left_out(server: Running, plain: Accelerated) -> None:
    correct = expected(plain, {"prompt": P, "max_tokens": 12, "temperature": 0}).texts[0]
    nulls = dict.fromkeys([*CompletionBody.model_fields, *ABSENT, *NO_EFFECT, "colour", "prompt_logprobs"])
    del nulls["prompt"], nulls["max_tokens"], nulls["temperature"]
    nested = {
        "structured_outputs": {"json": None, "regex": "[a-z ,.]+", "colour": None},
        "response_format": {"type": "text", "json_schema": None, "strict": None},
        "references": [{"type": "text", "text": P, "title": None}],
    }
    assert text_of(server, **nulls) == correct
    assert text_of(server, **{**nulls, "references": nested["references"]}) == correct
    assert text_of(server, **{**nulls, **nested}) in (correct, correct.rstrip())
    options = {"include_usage": None, "colour": None}
    assert sent(server, "/v1/completions", {"prompt": [], "stream": True, "stream_options": options})[0] == 400
    status, _ = sent(server, "/tokenize", {"prompt": P, "messages": None, "tools": None, "colour": None})
    assert status == 200


def test_a_seed_of_minus_one_is_drawn(server: Running, plain: Accelerated) -> None:
    answers = [completed(server, seed=-1, temperature=1.0, max_tokens=20) for _ in range(3)]
    seeds = [answer["truedraft"]["seed"] for answer in answers]
    assert len({*seeds}) == 3
    for answer, seed in zip(answers, seeds, strict=True):
        body = {"prompt": P, "max_tokens": 20, "temperature": 1.0, "seed": seed}
        assert [answer["choices"][0]["text"]] == expected(plain, body).texts


# ---------------------------------------------------------------- parameters that this server lacks


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_neutral_values_are_accepted_and_others_refused(body: Any) -> None:
    own = {"prompt": P} if body is CompletionBody else {"messages": [USER]}
    bare = body.model_validate(own)
    lacking = {**ABSENT, **(ABSENT_IN_CHAT if body is ChatBody else {})}
    assert len(lacking) > 60
    for name, absent in lacking.items():
        if name in body.model_fields:
            continue  # it is honoured by now
        for value in (None, "", [], {}, *absent.neutral):
            assert body.model_validate({**own, name: value}) == bare, (name, value)
        strengths = dict.fromkeys(absent.of, 0.5)
        with pytest.raises(ApiError) as raised:
            body.model_validate({**own, name: "something", **strengths})
        assert raised.value.param in (name, *strengths) and raised.value.param in str(raised.value)
        if absent.of:  # without a strength nothing is asked for
            assert body.model_validate({**own, name: 17.5}) == bare
    for name in NO_EFFECT:
        assert body.model_validate({**own, name: "something"}) == bare


@pytest.mark.parametrize(
    "more",
    [
        {"use_beam_search": False, "length_penalty": 1.0, "best_of": 1, "echo": False, "priority": 0},
        {"repeat_penalty": 1.0, "repeat_last_n": 64, "mirostat": 0, "mirostat_tau": 5, "cache_prompt": True},
        {"top_k": 0, "min_p": 0, "top_p": 1, "typical_p": 1, "tfs_z": 1.0, "samplers": [], "n_keep": 0, "stop": None},
        {"separate_reasoning": True, "no_stop_trim": False, "rid": "x", "return_hidden_states": False},
        {"keep_alive": "5m", "options": {}, "format": "", "raw": False},
        {"functions": [], "function_call": "none", "suffix": "", "cache_control": {"type": "ephemeral"}},
        {"guided_decoding_backend": "xgrammar", "guided_json": None, "guided_whitespace_pattern": None, "grammar": ""},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_changes_nothing(server: Running, plain: Accelerated, more: dict[str, Any]) -> None:
    body = {"prompt": P, "max_tokens": 12, "temperature": 0}
    assert [text_of(server, **more)] == expected(plain, body).texts


@pytest.mark.parametrize("spelling", ["n_predict", "max_new_tokens", "num_predict"])
def test_other_names_mean_the_same(server: Running, plain: Accelerated, spelling: str) -> None:
    correct = expected(plain, {"prompt": P, "max_tokens": 5, "temperature": 0}).texts[0]
    assert (
        text_of(server, max_tokens=None, **{spelling: 5}) == correct == text_of(server, max_tokens=5, **{spelling: 5})
    )
    assert text_of(server, max_tokens=None, extra_body={spelling: 5}) == correct
    status, answer = sent(server, "/v1/completions", {"prompt": P, "max_tokens": 5, spelling: 6})
    assert (status, answer["error"]["param"]) == (400, spelling)
    status, answer = sent(server, "/v1/completions", {"prompt": P, spelling: 10**6})
    assert (status, answer["error"]["param"]) == (400, spelling)
    assert spelling in answer["error"]["message"] and "max_tokens" not in answer["error"]["message"]


def test_minus_one_token_is_the_rest_of_the_context(plain: Accelerated) -> None:
    with running(plain, max_model_len=48) as server:
        for path, own in (("completions", {"prompt": P}), ("chat/completions", {"messages": [USER]})):
            body = {**own, "max_tokens": -1, "ignore_eos": True, "temperature": 0}
            status, answer = sent(server, f"/v1/{path}", body)
            assert status == 200 and answer["usage"]["total_tokens"] == 48
            assert answer["choices"][0]["finish_reason"] == "length"


# ---------------------------------------------------------------- constraints under other names


def test_guided_decoding_is_structured_outputs(server: Running) -> None:
    settings = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    gbnf = 'root ::= ("cat" | "dog") "!"'
    for names, value, member in (
        (("guided_regex", "regex"), "[ab]{3}", "regex"),
        (("guided_choice",), ["red", "green"], "choice"),
        (("guided_grammar", "grammar", "ebnf"), gbnf, "grammar"),
        (("guided_json", "json_schema"), SCHEMA, "json"),
        (("guided_json", "json_schema"), json.dumps(SCHEMA), "json"),
        (("guided_json_object",), True, "json_object"),
    ):
        texts = {text_of(server, **settings, structured_outputs={member: value})}
        texts |= {text_of(server, **settings, **{name: value}) for name in names}
        (text,) = texts
        if member == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif member == "json_object":
            assert text.startswith("{")
        else:
            assert re.fullmatch({"regex": "[ab]{3}", "choice": "red|green", "grammar": "(cat|dog)!"}[member], text)
    form = {"type": "json_object", "schema": SCHEMA}
    jsonschema.validate(json.loads(text_of(server, **settings, response_format=form)), SCHEMA)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_regex": "[ab"}, "guided_regex", "unclosed character class"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": {"type": "nope"}}, "guided_json", "Invalid type"),
        ({"ebnf": "x ::="}, "ebnf", "root"),
        ({"guided_choice": []}, "guided_choice", "at least one text"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "structured_outputs", "exactly one"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "white space"),
        ({"structural_tag": {"type": "x"}}, "structural_tag", "tool_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "tool_choice"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, 
         "structured_outputs.whitespace_pattern", "white"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace", "white space"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties", "additionalProperties"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type", "tool_choice"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex", "differ"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "llguidance"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format", "not"),
    ],
)  # fmt: skip
def test_constraints_that_cannot_be_enforced_are_refused(
    server: Running, body: dict[str, Any], param: str, words: str
) -> None:
    status, answer = sent(server, "/v1/completions", {"prompt": P, **body})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"] and words in answer["error"]["message"]


# ---------------------------------------------------------------- bad words


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "n": 3, "top_k": 30}, {"repetition_penalty": 1.2}])
def test_bad_words_are_those_of_generate(server: Running, plain: Accelerated, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {"prompt": P, "max_tokens": 30, "temperature": 0, "seed": 4, **more}
    prediction = {"type": "content", "content": expected(plain, body).texts[0]}  # drafts of what is then forbidden
    words: list[str] = []
    for _ in range(4):  # each time another word of what was written
        found = expected(plain, {**body, "bad_words": words} if words else body)
        answer = completed(server, **body, bad_words=words or None, prediction=prediction)
        assert [choice["text"] for choice in answer["choices"]] == found.texts
        told = found.texts[0].split()
        words.append(" ".join(told[len(words) * 2 :][: 1 + len(words) % 2]))
    assert answer["truedraft"]["drafted_tokens"] > 0
    penalties = {**body, "bad_words": words, "frequency_penalty": 0.5, "logit_bias": {"3002": 4.0}, "stop": ["the"]}
    found = [choice["text"] for choice in completed(server, **penalties)["choices"]]
    assert found == expected(plain, penalties).texts


def test_bad_words_go_with_constraints(server: Running, plain: Accelerated) -> None:
    body = {"prompt": P, "max_tokens": 30, "temperature": 0, "bad_words": ["park", "tree", "climb"]}
    any_text = {"structured_outputs": {"regex": r"(.|\n)*"}}  # which allows all that the model writes
    (correct,) = expected(plain, body).texts
    assert text_of(server, **body, **any_text) == correct != text_of(server, max_tokens=30)
    letters = {"structured_outputs": {"regex": "[a-z ]+"}}
    text = text_of(server, **body, **letters)
    assert re.fullmatch("[a-z ]+", text) and not re.search(r"\b(park|tree|climb)\b", text)


def test_a_bad_word_does_not_end_a_text(server: Running, plain: Accelerated) -> None:
    body = {"prompt": P, "max_tokens": 40, "temperature": 0, "bad_words": ["."], "return_tokens": True}
    (end,) = plain.tokenizer(".", add_special_tokens=False).input_ids  # type: ignore[misc]
    (correct,) = expected(plain, body).tokens
    (choice,) = completed(server, **body, stop_token_ids=[end])["choices"]
    assert [token["id"] for token in choice["tokens"]] == correct and end not in correct
    (choice,) = completed(server, **{**body, "bad_words": None}, stop_token_ids=[end])["choices"]
    assert choice["tokens"][-1]["id"] == end


@pytest.mark.parametrize("words", [[""], ["  "], ["<|end|>"], "park", [5], ["x"] * 2000])
def test_bad_words_that_are_none(server: Running, words: Any) -> None:
    status, answer = sent(server, "/v1/completions", {"prompt": P, "bad_words": words})
    assert status == 400 and answer["error"]["param"].startswith("bad_words"), answer


# ---------------------------------------------------------------- messages


HISTORY: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "no"}, {"role": "user", "content": "why?"}]


@pytest.mark.parametrize(
    ("at", "more"),
    [
        (1, {"tool_calls": [], "function_call": None, "refusal": None, "audio": None, "annotations": []}),
        (1, {"refusal": "", "name": "helper", "provider_specific_fields": {"refusal": None}}),
        (0, {"name": "anna", "tool_calls": [], "cache_control": {"type": "ephemeral"}}),
        (0, {"content": [{"type": "text", "text": P, "cache_control": {"type": "ephemeral"}, "annotations": None}]}),
        (1, {"content": [{"type": "output_text", "text": "no", "annotations": [], "logprobs": []}], "prefix": False}),
        (2, {"content": [{"type": "input_text", "text": "why?"}], "colour": None}),
    ],
)  # fmt: skip
def test_fields_of_messages_that_say_nothing(server: Running, at: int, more: dict[str, Any]) -> None:
    messages = [message | (more if i == at else {}) for i, message in enumerate(HISTORY)]
    assert prompt_of(server, messages) == prompt_of(server, HISTORY)


def test_reasoning_in_histories_is_shown_under_the_name_of_the_template(server: Running) -> None:
    thoughtful = {"role": "assistant", "content": "no", "reasoning_content": "hm"}
    shown = prompt_of(server, [USER, thoughtful])
    assert "assistant: (hm) no" in shown
    for name in ("reasoning", "thinking"):
        renamed = {name: "hm", **{k: v for k, v in thoughtful.items() if k != "reasoning_content"}}
        assert prompt_of(server, [USER, renamed]) == shown


def test_arguments_of_calls_may_be_objects_and_tools_marked_for_caches(server: Running) -> None:
    function = {"name": "look", "arguments": '{"at": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    as_object = {**call, "function": {**function, "arguments": {"at": 1}}, "index": 0, "cache_control": None}
    result = {"role": "tool", "tool_call_id": "1", "name": "look", "content": "a cat"}
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    mark = {"cache_control": {"type": "ephemeral"}}
    prompts = {
        prompt_of(server, [USER, {"role": "assistant", "content": None, "tool_calls": [one]}, result], tools=offered)
        for one in (call, as_object)
        for offered in (tools, [{**tools[0], **mark}], [{**tools[0], "function": {**tools[0]["function"], **mark}}])
    }
    assert len(prompts) == 1


def test_tools_that_are_none_need_no_choice(server: Running, plain: Accelerated) -> None:
    own = {"messages": [USER], "max_tokens": 8, "temperature": 0}
    texts = set()
    for more in ({}, {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none", "parallel_tool_calls": False},
                 {"tools": [], "parallel_tool_calls": True, "tool_choice": "auto"}):  # fmt: skip
        status, answer = sent(server, "/v1/chat/completions", {**own, **more})
        assert status == 200, (more, answer)
        texts.add(answer["choices"][0]["message"]["content"])
    assert len(texts) == 1
    for choice in ("required", "any", {"type": "any"}, {"type": "function", "function": {"name": "look"}}):
        status, answer = sent(server, "/v1/chat/completions", {**own, "tool_choice": choice})
        assert (status, answer["error"]["param"]) == (400, "tools")


def test_choices_of_tools_have_the_forms_of_other_apis() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    for given, meant in (
        ("any", "required"), ({"type": "any"}, "required"), ({"type": "auto"}, "auto"), ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, named), ({"type": "function", "name": "look"}, named), (named, named),
        ("required", "required"),
    ):  # fmt: skip
        body = {"messages": [USER], "tools": [named], "tool_choice": given}
        assert ChatBody.model_validate(body).tool_choice == meant


@pytest.mark.parametrize(
    ("more", "off"),
    [
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "low"}, False),
        ({"reasoning_effort": "high"}, False),
        ({"enable_thinking": False}, True),
        ({"think": False}, True),
        ({"think": "medium"}, False),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "enabled"}}, False),
        ({"reasoning": {"effort": "none", "exclude": False}}, True),
        ({"reasoning": {"enabled": False}}, True),
        ({"chat_template_kwargs": {"thinking": False}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"}, True),
    ],
)
def test_reasoning_effort_turns_the_switch_of_the_template(server: Running, more: dict[str, Any], off: bool) -> None:
    status, answer = sent(server, "/v1/chat/completions", {"messages": [USER], "max_tokens": 1, **more})
    assert status == 200, answer
    tokenizer: Any = server.server.model.tokenizer
    lengths = {
        switch: len(tokenizer.apply_chat_template([USER], enable_thinking=switch)["input_ids"])
        for switch in (True, False)
    }
    assert answer["usage"]["prompt_tokens"] == lengths[not off] != lengths[off]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "reasoning_effort"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "reasoning_effort"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
        ({"think": 5}, "think"),
        ({"thinking_budget": 100}, "thinking_budget"),
        ({"include_reasoning": False}, "include_reasoning"),
    ],
)
def test_reasoning_that_cannot_be_had_is_refused(server: Running, more: dict[str, Any], param: str) -> None:
    status, answer = sent(server, "/v1/chat/completions", {"messages": [USER], **more})
    assert (status, answer["error"]["param"]) == (400, param), answer


# ---------------------------------------------------------------- endpoints and bytes


def test_health_and_its_siblings_answer_head_and_get(server: Running) -> None:
    for path in ("/health", "/v1/health", "/ping", "/version", "/v1/models", "/v1/models/nano", "/metrics", "/"):
        assert sent(server, path, method="HEAD") == (200, None)
        with urllib.request.urlopen(server.url + path, timeout=10) as answer:
            assert answer.status == 200 and answer.read()
    assert sent(server, "/version")[1] == {"version": truedraft.__version__}
    assert sent(server, "/v1/models/other", method="HEAD")[0] == 404


def test_a_byte_order_mark_is_no_part_of_a_body(server: Running, tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    body = {"prompt": P, "max_tokens": 5, "temperature": 0}
    status, answer = sent(server, "/v1/completions", data=mark + json.dumps(body).encode())
    assert status == 200 and answer["choices"][0]["text"] == text_of(server, max_tokens=5)
    status, answer = sent(server, "/tokenize", data=mark + json.dumps({"prompt": P}).encode())
    assert status == 200
    assert sent(server, "/tokenize", data=mark + mark + b"{}")[0] == 400
