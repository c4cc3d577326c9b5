"""Sentences of refusals by the served API: about the parameters of requests, by their names there, in `param` too."""

from __future__ import annotations

import inspect
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import pytest

pytest.importorskip("fastapi")
from transformers import GenerationConfig

import truedraft
from served import Running, running
from truedraft.accelerated import Accelerated
from truedraft.continuous import ContinuousEngine
from truedraft.errors import Broken, NoRoom, Refused
from truedraft.loading import load
from truedraft.serve.refusals import ARGUMENTS, PARAMETERS, of_refusal

P = "one day, a little girl"
USER = {"role": "user", "content": P}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if documents %}{{ documents }}{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
EVERYTHING: dict[str, Any] = {
    "prompt": P, "max_tokens": 9, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "n": 2, "seed": 3,
    "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": 1},
    "stop": ["zz"], "stop_token_ids": [4000], "min_tokens": 2, "bad_words": ["zz"], "logprobs": 1,
    "references": ["a text"], "structured_outputs": {"regex": "[a-z ]+"},
    "prediction": {"type": "content", "content": "a text"},
}  # fmt: skip
INTERNAL = {"namespace", "num_beams"}  # follow from the API key, and from what a server does; no parameter sets them
# names by which generate, and this library, have what the API has under another name
FOREIGN = (
    {*inspect.signature(ContinuousEngine.add_request).parameters, *vars(GenerationConfig())}
    | {"input_ids", "attention_mask", "logits_processor", "stopping_criteria", "max_length", "template_kwargs"}
) - PARAMETERS - INTERNAL - {"self", "rule", "sequence", "kwargs", "streamer", "constraints"}  # fmt: skip


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.fixture(scope="module")
def server(fast: Accelerated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("refusals") / "template"
    template.write_text(TEMPLATE)
    with running(fast, max_rows=2, chat_template=str(template)) as made:
        yield made


def sent(server: Running, path: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def passed_on(server: Running, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which a request's rows are added to the engine."""
    found: dict[str, Any] = {}
    engine = server.server.loop.engine
    add = engine.add_request

    def recording(ids: Any, **kwargs: Any) -> Any:
        found.update(kwargs)
        return add(ids, **kwargs)

    monkeypatch.setattr(engine, "add_request", recording)
    status, answer = sent(server, "/v1/completions", body)
    assert status == 200, answer
    return found


def test_every_argument_that_the_server_passes_on_has_a_parameter(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"input_ids", *passed_on(server, monkeypatch, EVERYTHING)}
    assert len(arguments) > 18
    assert arguments <= PARAMETERS | ARGUMENTS.keys() | INTERNAL
    assert ARGUMENTS.keys() - {"sequence"} <= FOREIGN
    assert {*ARGUMENTS.values()} <= PARAMETERS and not ARGUMENTS.keys() & PARAMETERS


@pytest.mark.parametrize("name", [*ARGUMENTS, "draft", "references", "seed", "top_k"])
def test_what_the_engine_refuses_is_about_parameters(
    server: Running, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refusing(ids: Any, **kwargs: Any) -> Any:
        raise Refused(f"{name}=5: it is too much for 3 rows; give {name}=4, as in --other-{name.replace('_', '-')}")

    monkeypatch.setattr(server.server.loop.engine, "add_request", refusing)
    status, answer = sent(server, "/v1/completions", {"prompt": P})
    error = answer["error"]
    assert status == 400 and error["param"] == ARGUMENTS.get(name, name)
    assert error["message"].startswith(f"{error['param']}=5: it is") and f"give {error['param']}=4" in error["message"]


def test_words_within_others_are_not_replaced() -> None:
    text = "the sequence of my_input_ids and input_ids_ is generate.input_ids"
    assert of_refusal(Refused(text)).message == text and of_refusal(Refused(text)).param is None
    error = of_refusal(Refused("set max_new_tokens to at most 5"))
    assert (error.message, error.param) == ("set max_tokens to at most 5", None)
    assert of_refusal(Refused("messages[3].content[0].text is no text: give a string")).param == (
        "messages[3].content[0].text"
    )


def test_faults_of_the_model_and_lack_of_memory_are_no_faults_of_the_request() -> None:
    assert of_refusal(Broken("the target's logits are NaN")).body()["error"]["type"] == "server_error"
    assert of_refusal(NoRoom("no memory")).status == 503


TOOL = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 10**5}, "max_tokens"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[1], ["x"]]}, "prompt[1][0]"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": [9999]}, "prompt"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 99}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [9999]}, "stop_token_ids"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"logit_bias": {"5": 500}}, "logit_bias.5"),
    ({"best_of": 4}, "best_of"),
    ({"logprobs": 99}, "logprobs"),
    ({"draft": "eagle3"}, "draft"),
    ({"references": [{"type": "file", "name": 5}]}, "references[0].name"),
    ({"references": [{"type": "photo"}]}, "references[0]"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
    ({"max_tokns": 5}, "max_tokns"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"suffix": "the end"}, "suffix"),
]  # fmt: skip
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": "9", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "function": 5}]}]}, "messages[1].tool_calls[0]"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages[1].tool_calls"),
    ({"tools": [TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tools"),
    ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template": "x"}, "chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"max_completion_tokens": 10**5}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"functions": [TOOL["function"]]}, "functions"),
    ({"function_call": {"name": "look"}}, "function_call"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ({"audio": {"voice": "a"}}, "audio"),
    ({"verbosity": "low"}, "verbosity"),
    ({"n": 0}, "n"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/completions", {"prompt": P, **body}, param) for body, param in COMPLETIONS]
    + [("/v1/chat/completions", {"messages": [USER], **body}, param) for body, param in CHATS],
)
def test_refusals_name_the_parameter(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    status, answer = sent(server, path, body)
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), answer
    assert re.split(r"[.\[]", param)[-1].rstrip("0123456789]") in error["message"]
    assert len(error["message"]) > 20 and "\n" not in error["message"]
    words = {*re.findall(r"[a-z_]+", error["message"])}
    assert not words & FOREIGN, words & FOREIGN


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": P, "messages": [USER]}, "prompt"), ({"prompt": 5}, "prompt"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)  # fmt: skip
def test_refusals_of_tokenize_name_the_parameter(server: Running, body: dict[str, Any], param: str) -> None:
    status, answer = sent(server, "/tokenize", body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert param in answer["error"]["message"]


def test_detokenize_names_the_token(server: Running) -> None:
    for tokens, param in (([9999], "tokens"), (["x"], "tokens[0]"), (None, "tokens"), ([-1], "tokens[0]")):
        status, answer = sent(server, "/detokenize", {"tokens": tokens})
        assert (status, answer["error"]["param"]) == (400, param)
    assert sent(server, "/detokenize", {"tokens": [2974.0]})[0] == 200
