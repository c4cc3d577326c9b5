"""Tool calls and reasoning in generated text: any division gives the same message, and no text is lost."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import llguidance
import llguidance.hf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validate
from transformers import PreTrainedTokenizerBase

from truedraft import Refused
from truedraft.loading import load_tokenizer
from truedraft.text.tool_calls import Delta, ResponseTemplateParser, TagParser, ToolParser, markers, parser_for
from truedraft.text.tool_grammar import call_grammar

HERMES = "{{ tools }}<tool_call></tool_call>"
THINKING = HERMES + "<think></think>"
MISTRAL = "{{ tools }}[TOOL_CALLS]"
LLAMA = "{{ tools }}<|start_header_id|>ipython <|python_tag|> parameters"
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "n": {"$ref": "#/$defs/n"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "go"}},
]
NAMES = {"look", "go"}
RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.args}"}},
        },
        "content": {},
    },
}  # fmt: skip


def parser(template: str, prompt: str = "", names: Any = NAMES) -> ToolParser:
    found = TagParser.for_template(template, names, prompt)
    assert found is not None
    return found


def message(reader: ToolParser, *pieces: str) -> tuple[str, list[tuple[str, Any]], str]:
    """Content, (name, arguments) of the calls, and reasoning."""
    deltas = [*map(reader.feed, pieces), reader.finish()]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call["index"] for call in calls] == [*range(len(calls))]
    assert len({call["id"] for call in calls}) == len(calls) and all(call["type"] == "function" for call in calls)
    functions = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    return "".join(d.content for d in deltas), functions, "".join(d.reasoning for d in deltas)


LOOK = '{"name": "look", "arguments": {"at": "é <b>"}}'
CASES: list[tuple[str, str, tuple[str, list[Any], str]]] = [
    (HERMES, "Hello.", ("Hello.", [], "")),
    (HERMES, " a < b <tool", (" a < b <tool", [], "")),
    (HERMES, f"I look.\n<tool_call>\n{LOOK}\n</tool_call>", ("I look.", [("look", {"at": "é <b>"})], "")),
    (
        HERMES,
        f'<tool_call>{LOOK}</tool_call>\n<tool_call>{{"name": "go"}}</tool_call>\n',
        ("", [("look", {"at": "é <b>"}), ("go", {})], ""),
    ),
    (HERMES, f"<tool_call>{LOOK}", ("", [("look", {"at": "é <b>"})], "")),  # ended by the end token
    (HERMES, '\n<tool_call>{"name": "look", "arg', ('\n<tool_call>{"name": "look", "arg', [], "")),
    (
        HERMES,
        r'<tool_call>{"name": "look", "arguments": {"at": "\"</tool_call>"}}</tool_call> ok',
        ("ok", [("look", {"at": '"</tool_call>'})], ""),
    ),
    (HERMES, "a <tool_call>", ("a <tool_call>", [], "")),
    (HERMES, "a <tool_call>x</tool_call> b", ("a <tool_call>x</tool_call> b", [], "")),
    (HERMES, '<tool_call>{"name": "rm"}</tool_call>', ('<tool_call>{"name": "rm"}</tool_call>', [], "")),
    (
        HERMES,
        '<tool_call>{"name": "go", "arguments": NaN}</tool_call>',
        ('<tool_call>{"name": "go", "arguments": NaN}</tool_call>', [], ""),
    ),
    (THINKING, "<think>\nHm <b>\n</think>\n\nYes. <think>", ("Yes. <think>", [], "Hm <b>")),
    (THINKING, f"\n<think>Hm</think><tool_call>{LOOK}</tool_call>", ("", [("look", {"at": "é <b>"})], "Hm")),
    (THINKING, "<thin", ("<thin", [], "")),
    (THINKING, "<think> unended ", ("", [], "unended ")),
    (MISTRAL, f"Look: [TOOL_CALLS] [{LOOK}]", ("Look:", [("look", {"at": "é <b>"})], "")),
    (MISTRAL, "[TOOL_CALLS] []", ("[TOOL_CALLS] []", [], "")),
    (MISTRAL, "[TOOL_CALLS] look", ("[TOOL_CALLS] look", [], "")),
    (LLAMA, ' {"name": "go", "parameters": {}}', ("", [("go", {})], "")),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "go", "parameters": {}}', ("", [("go", {})], "")),
    (LLAMA, '{"name": "Anna", "age": 7}', ('{"name": "Anna", "age": 7}', [], "")),
    (LLAMA, 'A {"name": "go", "parameters": {}}', ('A {"name": "go", "parameters": {}}', [], "")),
    (LLAMA, "[" + "{" * 5000, ("[" + "{" * 5000, [], "")),
    (LLAMA, '{"name":' * 5000, ('{"name":' * 5000, [], "")),
]


@pytest.mark.parametrize(("template", "text", "expected"), CASES, ids=[case[1][:30] for case in CASES])
def test_calls_and_content(template: str, text: str, expected: Any) -> None:
    assert message(parser(template), text) == expected
    assert message(parser(template), *text) == expected


def test_a_prompt_may_have_begun_the_reasoning() -> None:
    assert message(parser(THINKING, "<assistant><think>\n"), "Hm\n</think>\nYes") == ("Yes", [], "Hm")
    assert message(parser(THINKING, "<think>\n\n</think>\n\n"), "Yes") == ("Yes", [], "")


def test_without_tools_calls_are_content() -> None:
    assert TagParser.for_template(HERMES, set()) is None
    text = f"<tool_call>{LOOK}</tool_call>"
    assert message(parser(THINKING, names=set()), "<think>Hm</think>" + text) == (text, [], "Hm")


def test_unknown_formats_have_no_parser() -> None:
    for template in ("{{ m.content }}", "{{ tools }}<|user|><|assistant|>", "<tools>{{ tools }}</tools>"):
        assert TagParser.for_template(template, NAMES) is None


def test_content_is_not_held_back() -> None:
    reader = parser(HERMES)
    assert reader.feed("a b ") == Delta("a b")
    assert reader.feed("c <") == Delta(" c")
    assert reader.feed("d") == Delta(" <d")


def test_mistral_ids_fit_its_template() -> None:
    reader = parser(MISTRAL)
    (made,) = reader.feed(f"[TOOL_CALLS] [{LOOK}]").tool_calls  # passed on as soon as it is whole
    assert reader.finish() == Delta()
    assert re.fullmatch("[a-zA-Z0-9]{9}", made["id"])


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", LOOK, f"[{LOOK}]",
    '{"name": "go", "parameters": {}}', "[]", "\n", " ", "<", "{", "}", "text", "é", '"',
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)


def divided(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def without_tags(text: str) -> str:
    return re.sub(r"</?think>|\s+", "", text)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 300), max_size=6), st.sampled_from([HERMES, THINKING, MISTRAL, LLAMA]))
def test_any_division_gives_the_same_message(text: str, cuts: list[int], template: str) -> None:
    whole = message(parser(template), text)
    assert message(parser(template), *divided(text, cuts)) == whole
    content, calls, reasoning = whole
    if not calls:
        assert sorted(without_tags(content + reasoning)) == sorted(without_tags(text))


OWN = ("<call>", "</call>", '{"name": "go", "args": {}}', "<think>", "</think>", "a", " ", "<")
OWN_TEXTS = st.lists(st.sampled_from(OWN), max_size=8).map("".join)


@settings(max_examples=60, deadline=None)
@given(OWN_TEXTS, st.lists(st.integers(0, 99), max_size=4))
def test_response_templates_too(text: str, cuts: list[int]) -> None:
    whole = message(ResponseTemplateParser(RESPONSE_TEMPLATE, TOOLS, ""), text)
    assert message(ResponseTemplateParser(RESPONSE_TEMPLATE, TOOLS, ""), *divided(text, cuts)) == whole
    if not whole[1]:
        assert sorted(without_tags(whole[0] + whole[2])) == sorted(without_tags(text))


@pytest.mark.parametrize("thought", ["a", "<"])
def test_a_call_without_end_is_content_without_the_thought_before_it(thought: str) -> None:
    reader = ResponseTemplateParser(RESPONSE_TEMPLATE, TOOLS, "")
    assert message(reader, f"<think>{thought}</think><call>") == ("<call>", [], thought)


def test_a_tokenizers_own_response_template_is_used() -> None:
    tokenizer = load_tokenizer("nano", "MODEL")
    tokenizer.chat_template, tokenizer.response_template = THINKING, RESPONSE_TEMPLATE
    reader = parser_for(tokenizer, TOOLS, "<assistant><think>")
    assert isinstance(reader, ResponseTemplateParser)
    text = 'Hm</think>Yes <call>{"name": "look", "args": {"at": "x"}}</call><call>{"name": "rm", "args": {}}</call>!'
    expected = ("Yes " + '<call>{"name": "rm", "args": {}}</call>!', [("look", {"at": "x"})], "Hm")
    assert message(reader, text) == expected
    assert tokenizer.parse_response(text, prefix="<assistant><think>")["tool_calls"][0]["function"]["name"] == "look"
    with pytest.raises(Refused, match="tool_choice: the format"):
        call_grammar(tokenizer, TOOLS)


@pytest.fixture(scope="module")
def nano() -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer("nano", "MODEL")
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    return tokenizer


@pytest.fixture(scope="module")
def vocabulary(nano: PreTrainedTokenizerBase) -> Any:
    return llguidance.hf.from_tokenizer(nano)


def answers(form: str) -> tuple[list[str], list[str]]:
    """Answers that are calls of the tools, and others that a grammar must refuse."""
    key = "parameters" if form == LLAMA else "arguments"
    look, go = (f'{{"name": "{n}", "{key}": {a}}}' for n, a in (("look", '{"at": "x", "n": 5}'), ("go", "{}")))
    pairs = (("rm", "{}"), ("look", '{"n": 5}'), ("go", "1"))
    wrong = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in pairs]

    def wrap(*calls: str) -> str:
        if form == HERMES:
            return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        return f"[TOOL_CALLS] [{', '.join(calls)}]" if form == MISTRAL else "".join(calls)

    right = [wrap(look), wrap(go)] + ([wrap(look, go)] if form != LLAMA else [])
    return right, ["Hello", *(wrap(call) for call in wrong)]


def accepts(nano: PreTrainedTokenizerBase, vocabulary: Any, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    assert not matcher.get_error()
    ids: Any = nano(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
def test_the_grammar_accepts_exactly_calls(nano: PreTrainedTokenizerBase, vocabulary: Any, form: str) -> None:
    nano.chat_template = form
    grammar = call_grammar(nano, TOOLS)
    right, wrong = answers(form)
    for text in right:
        assert accepts(nano, vocabulary, grammar, text), text
        for name, arguments in message(parser(form), text)[1]:
            validate(arguments, SCHEMA if name == "look" else {})
    assert not [text for text in wrong if accepts(nano, vocabulary, grammar, text)]
    named = call_grammar(nano, TOOLS, name="go")
    assert [accepts(nano, vocabulary, named, text) for text in right] == [False, True, False][: len(right)]
    single = call_grammar(nano, TOOLS, parallel=False)
    assert [accepts(nano, vocabulary, single, text) for text in right] == [True, True, False][: len(right)]
    assert markers(nano) == ({"[TOOL_CALLS]"} if form == MISTRAL else set())


def test_the_grammar_lets_a_model_think_first(nano: PreTrainedTokenizerBase, vocabulary: Any) -> None:
    nano.chat_template = THINKING
    call = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'
    free = call_grammar(nano, TOOLS)
    assert accepts(nano, vocabulary, free, call)
    assert accepts(nano, vocabulary, free, f"<think>\na <b> {{c}}\n</think>\n\n{call}")
    begun = call_grammar(nano, TOOLS, prompt="<think>\n")
    assert accepts(nano, vocabulary, begun, f"a</think>\n\n{call}") and not accepts(nano, vocabulary, begun, call)


def test_tool_choices_that_cannot_be_forced(nano: PreTrainedTokenizerBase) -> None:
    nano.chat_template = HERMES
    with pytest.raises(Refused, match="'rm', which is none of the tools: there are look, go"):
        call_grammar(nano, TOOLS, name="rm")
    nano.chat_template = "{{ tools }}"
    with pytest.raises(Refused, match="tool_choice: the format of this model's tool calls is unknown"):
        call_grammar(nano, TOOLS)
    assert parser_for(nano, TOOLS) is None
