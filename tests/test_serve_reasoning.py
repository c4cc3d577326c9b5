"""Reasoning and constraints together: the constraint begins where the reasoning ends, streamed and whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

import truedraft  # noqa: E402
from served import Running, running  # noqa: E402
from tokenizers_for_tests import tokenizer_of  # noqa: E402
from truedraft import Refused  # noqa: E402
from truedraft.loading import load  # noqa: E402
from truedraft.serve.constraints import Constraints  # noqa: E402
from truedraft.text.tool_calls import Delta, parser_for  # noqa: E402
from truedraft.text.tool_grammar import answer_grammar  # noqa: E402

MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OPENS = MESSAGES + "assistant: <think>\n{# until </think> #}"  # as DeepSeek R1 and QwQ
MAY = MESSAGES + "assistant: {# <think> and </think> #}"  # as Qwen 3
ENDED = MESSAGES + "assistant: <think>\n\n</think>\n\n"  # as Qwen 3 without thinking
SCHEMA = {"enum": ["yes", "no"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module", params=["opens", "may"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """nano with tags of one token each."""
    template = tmp_path_factory.mktemp("templates") / "template.jinja"
    template.write_text({"opens": OPENS, "may": MAY}[request.param])
    model, tokenizer = load("nano")
    tokenizer.add_tokens(["<think>", "</think>"])
    model.resize_token_embeddings(len(tokenizer))  # type: ignore[operator]
    fast = truedraft.accelerate(model, tokenizer, control="fixed")
    with running(fast, chat_template=str(template), max_rows=4, allow_draft=("none", "suffix")) as made:
        yield made


def asked(server: Running, bias: dict[str, float], **body: Any) -> list[tuple[Any, Any]]:
    """(message, usage) of a request whole and streamed, with several drafters; they are all equal."""
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    given = {"model": "nano", "messages": [{"role": "user", "content": "say yes"}], "max_tokens": 40, "seed": 3}
    found = []
    for draft in ("auto", "none", "suffix"):
        more = {"extra_body": {"draft": draft}, "logit_bias": bias, "response_format": FORM, **given, **body}
        whole = api.chat.completions.create(**more)
        message = whole.choices[0].message
        found.append((message.content, getattr(message, "reasoning_content", None), whole.choices[0].finish_reason,
                      whole.usage.completion_tokens_details.reasoning_tokens))  # fmt: skip
        texts, details = {"content": "", "reasoning_content": ""}, None
        for chunk in api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **more):
            details = chunk.usage or details
            for choice, name in itertools.product(chunk.choices, texts):
                texts[name] += getattr(choice.delta, name, None) or ""
        assert details.completion_tokens_details.reasoning_tokens == found[-1][3]
        assert (texts["content"], texts["reasoning_content"] or None) == found[-1][:2]
    assert len({json.dumps(one) for one in found}) == 1
    return found[0]


def test_a_constraint_begins_where_reasoning_ends(server: Running) -> None:
    tokenizer = server.server.model.tokenizer
    opening, closing = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    opens = "<think>\n{#" in str(tokenizer.chat_template)
    ended = 0
    for seed in range(6):
        bias = {str(opening): -100.0 if opens else 60.0, str(closing): 14.0 if opens else 60.0}
        content, reasoning, reason, count = asked(server, bias, seed=seed, temperature=1.0)
        assert count > 0
        if reason == "stop":
            ended += 1
            assert json.loads(content) in SCHEMA["enum"] and not (reasoning or "").startswith('"')
            assert count < 40
        else:
            assert not content or content[0] == '"'
    assert ended >= 2


def test_other_constraints_begin_there_too(server: Running) -> None:
    tokenizer = server.server.model.tokenizer
    closing = str(tokenizer.convert_tokens_to_ids("</think>"))
    opening = str(tokenizer.convert_tokens_to_ids("<think>"))
    opens = "<think>\n{#" in str(tokenizer.chat_template)
    bias = {closing: 70.0, opening: -100.0 if opens else 60.0}
    for given, right in (
        ({"choice": ["blue", "green"]}, ("blue", "green")),
        ({"regex": "[0-9]{2}"}, [f"{i:02}" for i in range(100)]),
        ({"grammar": 'start: "left" | "right"'}, ("left", "right")),
    ):
        body = {"response_format": None, "extra_body": {"structured_outputs": given}, "temperature": 0}
        content, _, reason, count = asked(server, bias, **body)
        assert (content in right and reason == "stop") and 1 <= count <= 2


def test_without_an_end_of_reasoning_there_is_no_content(server: Running) -> None:
    tokenizer = server.server.model.tokenizer
    if "<think>\n{#" not in str(tokenizer.chat_template):
        pytest.skip("this template leaves the reasoning to the model")
    content, reasoning, reason, count = asked(server, {}, temperature=0)
    assert (content, reason, count) == ("", "length", 40) and reasoning


SPELLED = [
    (OPENS, "well</think>\n\n\"yes\"", "well", True),
    (OPENS, "\"yes\"</think>\"no\"", "\"yes\"", True),
    (OPENS, "\"yes\"", None, False),
    (MAY, "<think>a < b</think>\"no\"", "a < b", True),
    (MAY, "\"no\"", "", True),
    (MAY, "well</think>\"no\"", None, False),
    (ENDED, "\"no\"", "", True),
    (ENDED, "<think>a</think>\"no\"", None, False),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["nano", "sentencepiece", "byte-level"])
@pytest.mark.parametrize(("template", "text", "reasoning", "whole"), SPELLED)
def test_what_the_grammar_allows_is_what_the_parser_reads(
    kind: str, template: str, text: str, reasoning: str | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags of several ordinary tokens, in answers that are written out."""
    tokenizer = tokenizer_of(kind)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    messages = [{"role": "user", "content": "the day"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    around = answer_grammar(tokenizer, prompt=prompt)
    constraints = Constraints(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    enforced = constraints.enforced("json_schema", SCHEMA, 0, around)
    spelled = constraints._texts.spelled(text)
    assert spelled is not None
    ids = torch.tensor([[*spelled, tokenizer.eos_token_id]])
    if not whole:
        with pytest.raises(Refused):
            enforced(ids, None)  # type: ignore[arg-type]
        return
    assert not enforced(ids, None).item()  # type: ignore[arg-type]
    parser = parser_for(tokenizer, [], prompt)
    deltas = [Delta(text)] if parser is None else [*map(parser.feed, text), parser.finish()]
    assert json.loads("".join(delta.content for delta in deltas)) in SCHEMA["enum"]
    assert "".join(delta.reasoning for delta in deltas) == reasoning


def test_calls_of_tools_are_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("nano")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}<tool_call></tool_call>" + MESSAGES)
    around = answer_grammar(tokenizer, TOOLS, prompt="x")
    constraints = Constraints(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    call = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    for text, allowed in (
        ('"no"', True),
        (call, True),
        (f"{call}\n{call}", True),
        ("well", False),
        (f'"no"{call}', False),
    ):
        ids = torch.tensor([[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]])
        enforced = constraints.enforced("json_schema", SCHEMA, 0, around)
        if allowed:
            assert not enforced(ids, None).item()  # type: ignore[arg-type]
        else:
            with pytest.raises(Refused):
                enforced(ids, None)  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}" + MESSAGES)
    with pytest.raises(Refused, match="the format of this model's tool calls is unknown"):
        answer_grammar(tokenizer, TOOLS, prompt="x")
    assert answer_grammar(tokenizer, [], prompt="x") is None


def test_reasoning_of_response_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("nano")
    fields: dict[str, Any] = {"thinking": {"open": "<think>", "close": "</think>"}, "content": {}}
    monkeypatch.setattr(tokenizer, "chat_template", MESSAGES)
    monkeypatch.setattr(tokenizer, "response_template", {"start_anchor": "assistant:", "fields": fields}, raising=False)
    around = answer_grammar(tokenizer, prompt="assistant: <think>")
    assert around is not None and "</think>" in around
    parser = parser_for(tokenizer, [], "assistant: <think>")
    assert parser is not None and parser.in_reasoning
    parser.feed("a</think>")
    assert not parser.in_reasoning
    fields["thinking"] = {"open_pattern": "<t.*?>", "close": "</t>"}
    with pytest.raises(Refused, match="tells reasoning by patterns"):
        answer_grammar(tokenizer, prompt="")
    del fields["thinking"]
    assert answer_grammar(tokenizer, prompt="") is None


def test_a_template_is_needed(tmp_path: Path) -> None:
    _, tokenizer = load("nano")
    tokenizer.chat_template = None
    with pytest.raises(Refused, match="chat template"):
        answer_grammar(tokenizer)
