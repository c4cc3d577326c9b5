"""Tool calls in the formats of the families: each as its template writes them, with text around, in pieces or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tool_families import A_GO, ANALYSIS, FAMILIES, GO, HARMONY, JSON_LOOK, LLAMA_3, LOOK, P_GO, TOOLS, message, pieces
from truedraft.loading import load_tokenizer
from truedraft.text.tool_calls import TagParser, markers, parser_for
from truedraft.text.tool_formats import FORMATS, format_of


def test_every_format_has_a_family_here() -> None:
    found = {id(format_of("{{ tools }}" + template)) for template in (*(t for t, _ in FAMILIES.values()), HARMONY)}
    assert [form.name for form in FORMATS if id(form) not in found] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_calls_as_its_template_writes(family: str) -> None:
    template, text = FAMILIES[family]
    for before, after in (("", ""), ("I look.\n\n", ""), ("", "\n\nIt is {done}."), ("I look.\n", '\nDone; "yes"')):
        whole = message(template, before + text + after)
        assert whole == (before.rstrip() + after.lstrip(), [LOOK, GO], "")
        for seed in range(3):
            assert message(template, *pieces(before + text + after, seed)) == whole
        assert message(template, *(before + text + after)) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_no_offered_tool_is_content_and_the_others_are_calls(family: str) -> None:
    template, text = FAMILIES[family]
    alone = message(template, text, tools=[{"function": {"name": "run"}}])
    assert alone == (text, [], "")
    content, calls, _ = message(template, text, tools=TOOLS[:1])
    assert calls == [LOOK] and "go" in content and "007" not in content
    content, calls, _ = message(template, text, tools=TOOLS[1:])
    assert calls == [GO] and "007" in content and content.count("look") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_cut_off_is_not_lost(family: str) -> None:
    template, text = FAMILIES[family]
    for end in range(0, len(text), 5):
        content, calls, _ = message(template, text[:end])
        assert calls in ([], [LOOK], [LOOK, GO])
        if not calls:
            assert content == text[:end]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "glm", "deepseek_r1", "kimi_k2", "lfm2", "nemotron"])
def test_calls_after_reasoning(family: str) -> None:
    template, text = FAMILIES[family]
    thinking = f"{template}<think></think>"
    assert message(thinking, f"<think>\nHm {text}\n</think>\n\n{text}") == ("", [LOOK, GO], f"Hm {text}")
    assert message(thinking, *f"Hm</think>I look.\n{text}", prompt="<think>\n") == ("I look.", [LOOK, GO], "Hm")


QWEN, GLM, PYTHONIC = FAMILIES["qwen3_coder"][0], FAMILIES["glm"][0], FAMILIES["toolace"][0]
HERMES, MISTRAL, LFM2 = FAMILIES["hermes"][0], FAMILIES["mistral"][0], FAMILIES["lfm2"][0]
WRITTEN: list[tuple[str, str, list[Any], str]] = [
    # Python and its kin for JSON
    (
        HERMES,
        "<tool_call>{'name': 'look', 'arguments': {'at': 'it\\'s', 'on': True}}</tool_call>",
        [("look", {"at": "it's", "on": True})],
        "",
    ),
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"at": "x", "n": None,},}</tool_call>',
        [("look", {"at": "x", "n": None})],
        "",
    ),
    (HERMES, '<tool_call>{name: "look", arguments: {at: "x"}}</tool_call>', [("look", {"at": "x"})], ""),
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": "{\\"at\\": \\"x\\"}"}</tool_call>',
        [("look", {"at": "x"})],
        "",
    ),
    (HERMES, '<tool_call>{"name": "go", "arguments": null}</tool_call>', [GO], ""),
    (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "a\nb"}}</tool_call>', [("look", {"at": "a\nb"})], ""),
    (HERMES, '<tool_call>```json\n{"name": "go"}\n```</tool_call>', [GO], ""),
    (HERMES, '<tool_call>{"type": "function", "function": {"name": "go", "arguments": {}}}</tool_call>', [GO], ""),
    (HERMES, '<tool_call>{"name": "functions.go", "parameters": {}}</tool_call>', [GO], ""),
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"at": "\\ud83d"}}</tool_call>',
        [("look", {"at": "\ud83d"})],
        "",
    ),
    (
        HERMES,
        '<tool_call>{"name": "go", "arguments": [1]}</tool_call>',
        [],
        '<tool_call>{"name": "go", "arguments": [1]}</tool_call>',
    ),
    (
        HERMES,
        '<tool_call>{"name": "go", "arguments": {"x": 1e999}}</tool_call>',
        [],
        '<tool_call>{"name": "go", "arguments": {"x": 1e999}}</tool_call>',
    ),
    # strings that look like tags, and tags without their partners
    (
        HERMES,
        '<tool_call>{"name": "look", "arguments": {"at": "<tool_call>}]"}}</tool_call> b',
        [("look", {"at": "<tool_call>}]"})],
        "b",
    ),
    (HERMES, '<tool_call>{"name": "go"}\nThere.', [GO], "There."),
    (HERMES, 'Say <tool_call> so.\n<tool_call>{"name": "go"}</tool_call>', [GO], "Say <tool_call> so."),
    (
        HERMES,
        '<tool_call>{"name": "go"</tool_call><tool_call>{"name": "go"}</tool_call>',
        [GO],
        '<tool_call>{"name": "go"</tool_call>',
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "[TOOL_CALLS]"}}] ok',
        [("look", {"at": "[TOOL_CALLS]"})],
        "ok",
    ),
    (MISTRAL, '[TOOL_CALLS] [{"name": "go", "id": "123456789"}][TOOL_CALLS] [{"name": "go"}]', [GO, GO], ""),
    (MISTRAL, "[TOOL_CALLS] none, [1] says", [], "[TOOL_CALLS] none, [1] says"),
    # types by the schema
    (
        QWEN,
        "<tool_call>\n<function=look>\n<parameter=at>\n5\n</parameter>\n"
        "<parameter=n>\n-7\n</parameter>\n</function>\n</tool_call>",
        [("look", {"at": "5", "n": -7})],
        "",
    ),
    (
        QWEN,
        "<tool_call><function=look><parameter=at>true</parameter><parameter=on>True</parameter></function></tool_call>",
        [("look", {"at": "true", "on": True})],
        "",
    ),
    (
        QWEN,
        "<tool_call><function=look><parameter=at>\n def f():\n  return '</tool_call>'\n\n"
        "</parameter></function></tool_call>!",
        [("look", {"at": " def f():\n  return '</tool_call>'\n"})],
        "!",
    ),
    (
        QWEN,
        "<tool_call><function=look><parameter=at>{}</parameter>"
        "<parameter=tags>['x', \"y\"]</parameter></function></tool_call>",
        [("look", {"at": "{}", "tags": ["x", "y"]})],
        "",
    ),
    (
        QWEN,
        "<tool_call><function=look><parameter=at>x</parameter><parameter=n>many</parameter></function></tool_call>",
        [("look", {"at": "x", "n": "many"})],
        "",
    ),
    (
        QWEN,
        "<tool_call><function=look><parameter=at>x\n<parameter=n>5\n</function></tool_call>",
        [("look", {"at": "x", "n": 5})],
        "",
    ),
    (
        QWEN,
        "<tool_call><function=look>why<parameter=at>x</parameter></function></tool_call>",
        [],
        "<tool_call><function=look>why<parameter=at>x</parameter></function></tool_call>",
    ),
    (
        GLM,
        "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>",
        [("look", {"at": "12", "n": 12})],
        "",
    ),
    (
        GLM,
        "<tool_call>look<arg_key>at</arg_key><arg_value></tool_call></arg_value></tool_call>",
        [("look", {"at": "</tool_call>"})],
        "",
    ),
    # Python's calls
    (PYTHONIC, "[look('x', 5), go()]", [("look", {"at": "x", "n": 5}), GO], ""),
    (PYTHONIC, '[look(at="a]) b", tags=("p", "q"))]', [("look", {"at": "a]) b", "tags": ["p", "q"]})], ""),
    (PYTHONIC, "[look(at=where)]", [], "[look(at=where)]"),
    (PYTHONIC, "[look(at=\"x\" + 'y')]", [], "[look(at=\"x\" + 'y')]"),
    (PYTHONIC, "[look('a', 1, True, [], 'more')]", [], "[look('a', 1, True, [], 'more')]"),
    (PYTHONIC, "[1] says: [look(at)] is\n[see] it", [], "[1] says: [look(at)] is\n[see] it"),
    (
        LFM2,
        "<|tool_call_start|>[look(at='''a\n\"b\"''')]<|tool_call_end|>Looking.",
        [("look", {"at": 'a\n"b"'})],
        "Looking.",
    ),
    (LFM2, "<|tool_call_start|>[look(from_='x')]<|tool_call_end|>", [("look", {"from_": "x"})], ""),
    # answers that are no calls
    (LLAMA_3, '{"city": "Paris", "look": {"at": 1}}', [], '{"city": "Paris", "look": {"at": 1}}'),
    (
        LLAMA_3,
        'As in\n```json\n{"name": "go", "parameters": {}}\n```',
        [],
        'As in\n```json\n{"name": "go", "parameters": {}}\n```',
    ),
    (LLAMA_3, "I go.\n\n" + P_GO + "\n", [GO], "I go."),
    (LLAMA_3, "int f()\n{ // don't\n}\n" + P_GO, [GO], "int f()\n{ // don't\n}"),
    (LLAMA_3, P_GO + "; then", [GO], "; then"),
    (FAMILIES["command_r"][0], "Action: I would say [so].", [], "Action: I would say [so]."),
]


@pytest.mark.parametrize(("template", "text", "calls", "content"), WRITTEN, ids=[case[1][:40] for case in WRITTEN])
def test_what_models_write(template: str, text: str, calls: list[Any], content: str) -> None:
    assert message(template, text) == (content, calls, "")
    assert message(template, *text) == (content, calls, "")


def test_ids_in_the_text_are_kept() -> None:
    for family, expected in (
        ("kimi_k2", ["functions.look:0", "functions.go:1"]),
        ("mistral_ids", ["abcdefghi", "abcdefghj"]),
    ):
        template, text = FAMILIES[family]
        reader = TagParser.for_template(template, {"look", "go"})
        assert reader is not None
        made = [*reader.feed(text).tool_calls, *reader.finish().tool_calls]
        assert [call["id"] for call in made] == expected


CHANNELS: list[tuple[str, str, tuple[str, list[Any], str]]] = [
    ("", f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", ("Yes.", [], "Hm, <b>.")),
    ("", f"{ANALYSIS}<|channel|>final<|message|>Yes.", ("Yes.", [], "Hm, <b>.")),
    (
        "",
        f"{ANALYSIS}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{JSON_LOOK}<|call|>",
        ("", [LOOK], "Hm, <b>."),
    ),
    ("", f" to=functions.look<|channel|>commentary json<|message|>{JSON_LOOK}", ("", [LOOK], "")),
    (
        "",
        "<|channel|>commentary<|message|>I go.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.go<|message|>{}",
        ("I go.", [GO], ""),
    ),
    ("<|start|>assistant<|channel|>final<|message|>", "Yes.<|end|>", ("Yes.", [], "")),
    ("<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>", "Hm", ("", [], "Hm")),
    ("<|start|>assistant", "Yes, <|message|> is a tag.", ("Yes, <|message|> is a tag.", [], "")),
    ("", "Plain <|channel|> text", ("Plain <|channel|> text", [], "")),
    (
        "",
        "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
        ("<|channel|>commentary to=functions.rm<|message|>{}<|call|>", [], ""),
    ),
]


@pytest.mark.parametrize(("prompt", "text", "expected"), CHANNELS, ids=[case[1][-40:] for case in CHANNELS])
def test_channels(prompt: str, text: str, expected: Any) -> None:
    assert message(HARMONY, text, prompt=prompt) == expected
    assert message(HARMONY, *text, prompt=prompt) == expected


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<function=look>",
    "<parameter=at>",
    "</parameter>",
    "</function>",
    "<arg_key>at</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "look",
    "[ARGS]",
    "<|tool_call_start|>",
    "[look(at='x')]",
    "go()",
    A_GO,
    P_GO,
    JSON_LOOK,
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    ";",
    ",",
    "\n",
    " ",
    "<",
    "```",
    "text",
    "<think>",
    "</think>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "final",
    " to=functions.go",
]
TEMPLATES = [
    *(f"{FAMILIES[name][0]}<think></think>" for name in ("hermes", "qwen3_coder", "glm", "mistral_named", "llama3")),
    *(FAMILIES[name][0] for name in ("lfm2", "toolace", "deepseek_r1", "gemma4", "minicpm5", "xlam")),
    HARMONY,
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join), st.integers(0, 99), st.sampled_from(TEMPLATES))
def test_any_division_gives_the_same_message(text: str, seed: int, template: str) -> None:
    whole = message(template, text)
    assert message(template, *pieces(text, seed)) == whole
    content, calls, reasoning = whole
    if not calls and template != HARMONY:
        kept, given_text = ("".join(part.split()) for part in (reasoning + content, text))
        for tag in ("<think>", "</think>"):
            kept, given_text = kept.replace(tag, ""), given_text.replace(tag, "")
        assert sorted(kept) == sorted(given_text)


def test_the_parser_is_chosen_by_the_tokenizers_template() -> None:
    nano: PreTrainedTokenizerBase = load_tokenizer("nano", "MODEL")
    nano.chat_template = "{{ tools }}" + QWEN
    nano.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|im_end|>", "<|call|>"]})
    reader = parser_for(nano, TOOLS)
    assert reader is not None and markers(nano) == {"<tool_call>", "</tool_call>"}
    made = [*reader.feed(FAMILIES["qwen3_coder"][1]).tool_calls, *reader.finish().tool_calls]
    assert json.loads(made[0]["function"]["arguments"]) == LOOK[1]
    nano.chat_template = "{{ tools }}" + HARMONY
    assert markers(nano) == {"<|call|>", "<|end|>"} and parser_for(nano, []) is not None
