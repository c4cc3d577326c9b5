"""Chat by the server: templates, tool calls, constraints, predictions, references, tokenize, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import torch

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

import truedraft  # noqa: E402
from served import Running, running  # noqa: E402
from truedraft.accelerated import Accelerated  # noqa: E402
from truedraft.assets import edit_prompt, prompt  # noqa: E402
from truedraft.loading import load  # noqa: E402
from truedraft.serve.answer import BLOCK  # noqa: E402
from truedraft.serve.prediction import Prediction  # noqa: E402
from truedraft.serve.protocol import NO_EFFECT, REFUSED, ChatBody, CompletionBody  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{{ m.tool_call_id or '' }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "drop")
]

MESSAGES = [{"role": "user", "content": "one day, a cat"}]


@pytest.fixture(scope="module")
def fast() -> Accelerated:
    return truedraft.accelerate(*load("nano"))


@pytest.fixture(scope="module")
def server(fast: Accelerated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "template").write_text(TEMPLATE)
    (folder / "text").write_text(prompt("edit.py.txt"))
    with running(fast, chat_template=str(folder / "template"), reference={"code": Path(folder / "text")}) as made:
        yield made


@pytest.fixture
def api(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(api: Any, **settings: Any) -> Any:
    return api.chat.completions.create(**{"model": "nano", "messages": MESSAGES, "max_tokens": 60, **settings})


def test_every_parameter_of_openais_schema_is_honoured_refused_or_without_effect() -> None:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    for params, body in ((chat_params, ChatBody), (completion_create_params, CompletionBody)):
        for name in params.CompletionCreateParamsBase.__annotations__:
            kinds = [name in body.model_fields, name in REFUSED and name not in body.model_fields, name in NO_EFFECT]
            assert any(kinds), f"{name} would be refused as unknown"


def test_forced_calls_are_valid_and_streamed_as_they_are_returned(api: Any) -> None:
    for seed in range(3):
        settings: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 200}
        settings["parallel_tool_calls"] = False
        choice = chat(api, **settings).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        streamed: list[tuple[str, str]] = []
        for event in chat(api, **settings, stream=True):
            for call in event.choices[0].delta.tool_calls or [] if event.choices else []:
                streamed.append((call.function.name, call.function.arguments))
        assert streamed == [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        for name, arguments in streamed:
            jsonschema.validate(json.loads(arguments), TOOLS[0]["function"]["parameters"])
            assert name in ("add", "drop")
    named = chat(api, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "drop"}}, seed=1)
    assert [call.function.name for call in named.choices[0].message.tool_calls] == ["drop"]


class add(pydantic.BaseModel):
    n: int = pydantic.Field(ge=0, le=9)


def test_the_client_parses_calls_and_sends_its_messages_back(api: Any) -> None:
    asked = {"role": "user", "content": "a cat"}
    settings: dict[str, Any] = {
        "model": "nano", "messages": [asked], "tools": [openai.pydantic_function_tool(add)], "tool_choice": "required",
        "parallel_tool_calls": False, "max_tokens": 100, "seed": 1,
    }  # fmt: skip
    message = api.chat.completions.parse(**settings).choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == add(**json.loads(call.function.arguments))
    with api.chat.completions.stream(**settings) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.parsed_arguments) for event in done] == [("add", call.function.parsed_arguments)]
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    function = {"name": "add", "arguments": call.function.arguments}
    plain = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    texts = {
        chat(api, messages=[asked, answer, result], max_tokens=9, temperature=0).choices[0].message.content
        for answer in (plain, message, message.model_dump())
    }
    assert len(texts) == 1


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own generic types
def test_the_client_parses_a_model(api: Any) -> None:
    settings: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": "a cat"}], "seed": 1}
    settings |= {"response_format": add, "max_tokens": 150}
    message = api.chat.completions.parse(**settings).choices[0].message
    assert message.parsed == add(**json.loads(message.content))
    with api.chat.completions.stream(**settings) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    assert chat(api, messages=[message.model_dump(), {"role": "user", "content": "again"}], max_tokens=1).usage


def test_every_response_has_an_id_in_its_head(api: Any) -> None:
    whole = chat(api, max_tokens=2)
    assert whole._request_id == whole.id
    stream = chat(api, max_tokens=2, stream=True)
    assert {event.id for event in stream} == {stream.response.headers["x-request-id"]}
    ids = [api.models.list()._request_id, api.models.list()._request_id]
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(api, model="other")
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(api, temperature=-1)
    ids += [unknown.value.request_id, wrong.value.request_id]
    assert None not in ids and len({*ids}) == 4


def test_tools_that_cannot_be_honoured_are_refused(api: Any) -> None:
    for settings in (
        {"tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            chat(api, **settings)


def test_json_schema(api: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["a", "b"], "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for seed in range(3):
        texts = set()
        for draft in ("auto", "none"):
            response = chat(api, response_format=form, seed=seed, extra_body={"draft": draft}, max_tokens=150)
            assert response.choices[0].finish_reason == "stop"
            texts.add(response.choices[0].message.content)
        (text,) = texts
        jsonschema.validate(json.loads(text), schema)


def test_a_prediction_and_a_reference_save_passes_and_change_no_text(api: Any, server: Running) -> None:
    code = prompt("edit.py.txt")
    settings: dict[str, Any] = {
        "model": "nano", "prompt": edit_prompt(code, "Rename total to amount."), "max_tokens": 300, "temperature": 0
    }  # fmt: skip
    plain = api.completions.create(**settings, extra_body={"draft": "none"})
    assert plain.truedraft["mean_acceptance_length"] == 1
    for extra in (
        {"prediction": {"type": "content", "content": code}},
        {"references": [{"type": "file", "name": "code"}]},
        {"references": [{"type": "response", "id": plain.id}]},
        {"references": [code]},
    ):
        copied = api.completions.create(**settings, extra_body=extra)
        assert copied.choices[0].text == plain.choices[0].text
        assert copied.truedraft["passes"] < plain.truedraft["passes"] / 3
        details = copied.usage.completion_tokens_details
        accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        if "prediction" in extra:
            assert accepted + rejected == len(server.server.model.encoded(code, False)) and accepted > 10 * rejected
        else:
            assert (accepted, rejected) == (0, 0)


@pytest.mark.parametrize(
    ("predicted", "emitted", "accepted"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [5, 6, 7], 0),
        ([], [1], 0),
        ([1], [], 0),
        ([1, 2, 3, 4, 5, 6, 7], [1, 9, 3, 4, 5, 6, 7], 6),  # one replaced
        ([1, 2, 3, 4, 5, 6, 7], [1, 4, 5, 6, 7], 5),  # two dropped
        ([1, 2, 3, 4, 5], [1, 2, 9, 9, 3, 4, 5], 5),  # two added
        ([1, 2, 3], [1, 2, 3, 1, 2, 3], 3),  # each counts once
    ],
)
def test_accepted_tokens_of_a_prediction(predicted: list[int], emitted: list[int], accepted: int) -> None:
    for parts in ([emitted], [[token] for token in emitted]):
        prediction = Prediction(predicted)
        for part in parts:
            prediction.feed(part)
        assert (prediction.accepted, prediction.rejected) == (accepted, len(predicted) - accepted)


def test_logprobs_are_those_of_a_plain_forward(api: Any, fast: Accelerated) -> None:
    tokenizer: Any = fast.tokenizer
    text = "one day, a little girl"
    response = api.completions.create(
        model="nano", prompt=text, max_tokens=12, temperature=0, logprobs=3, extra_body={"return_tokens": True}
    )
    found, ids = response.choices[0].logprobs, tokenizer(text).input_ids
    for i, token in enumerate(response.choices[0].tokens):
        with torch.no_grad():
            logits = fast.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert abs(found.token_logprobs[i] - float(logits[token["id"]])) < 1e-4
        top = sorted(found.top_logprobs[i].values(), reverse=True)
        assert torch.allclose(torch.tensor(top), logits.topk(3).values, atol=1e-4)
        ids = [*ids, token["id"]]
    content = chat(api, logprobs=True, top_logprobs=2, seed=1).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)


def test_tokenize_and_detokenize(api: Any, fast: Accelerated) -> None:
    tokenizer: Any = fast.tokenizer
    post = api.with_options(base_url=str(api.base_url).replace("/v1", "")).post
    ids = post("/tokenize", body={"prompt": "a cat"}, cast_to=object)["tokens"]
    assert ids == tokenizer("a cat").input_ids
    assert "a cat" in post("/detokenize", body={"tokens": ids}, cast_to=object)["prompt"]
    shown = post("/tokenize", body={"messages": [{"role": "user", "content": "hi"}]}, cast_to=object)
    assert tokenizer.decode(shown["tokens"]).replace(" ", "") == "<user>hi\n<assistant>"


def test_streams_have_usage_where_it_is_asked_for(api: Any) -> None:
    for options, count in (({}, 0), ({"include_usage": True}, 1)):
        events = list(chat(api, seed=1, stream=True, stream_options=options))
        usages = [event.usage for event in events if event.usage is not None]
        assert len(usages) == count
        if usages:
            assert usages[0].total_tokens == usages[0].prompt_tokens + usages[0].completion_tokens > 1
    whole = chat(api, seed=1)
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == whole.choices[0].message.content
    assert usages[0].completion_tokens == whole.usage.completion_tokens


def test_obfuscated_events_differ_in_length_by_whole_blocks(api: Any) -> None:
    options = {"include_obfuscation": True, "continuous_usage_stats": True}
    settings = {"model": "nano", "messages": MESSAGES, "max_tokens": 24, "seed": 1}
    create = api.chat.completions.with_streaming_response.create
    with create(**settings, stream=True, stream_options=options) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: {")]
    assert len(events) > 2
    assert len({len(event.encode()) % BLOCK for event in events}) == 1
    chunks = [json.loads(event[6:]) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == api.chat.completions.create(**settings).choices[0].message.content
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert counts == sorted(counts) and 0 < counts[-1] <= 24


def test_prompts_of_ids_lists_and_echo(api: Any, fast: Accelerated) -> None:
    tokenizer: Any = fast.tokenizer
    texts = ["one day, a cat", "tom said"]
    ids = [tokenizer(text).input_ids for text in texts]
    settings: dict[str, Any] = {"model": "nano", "max_tokens": 6, "temperature": 0}
    by_text = [choice.text for choice in api.completions.create(prompt=texts, **settings).choices]
    assert [choice.text for choice in api.completions.create(prompt=ids, **settings).choices] == by_text
    assert api.completions.create(prompt=ids[1], **settings).choices[0].text == by_text[1]
    echoed = api.completions.create(prompt=texts, echo=True, **settings).choices
    assert [choice.text for choice in echoed] == [a + b for a, b in zip(texts, by_text, strict=True)]
    streamed = ["", ""]
    for event in api.completions.create(prompt=texts, echo=True, stream=True, **settings):
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in echoed]
