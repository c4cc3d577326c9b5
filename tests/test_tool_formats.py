"""Tool calls in the formats of the families: each as its template writes them, with text around, whole and in pieces."""

from __future__ import annotations

import json
import random
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
from truedraft.text.tool_calls import TagParser, markers, parser_for
from truedraft.text.tool_grammar import call_grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "n": {"$ref": "#/$defs/n"},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["at"],
    "$defs": {"n": {"type": "integer"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "go"}},
]
LOOK = ("look", {"at": "007", "n": 5, "on": True, "tags": ["a", 'b"c']})
GO: tuple[str, dict[str, Any]] = ("go", {})
JSON_LOOK = r'{"at": "007", "n": 5, "on": true, "tags": ["a", "b\"c"]}'
PYTHON_LOOK = "look(at='007', n=5, on=True, tags=['a', 'b\"c'])"
PYTHON_JSON = r'look(at="007", n=5, on=True, tags=["a", "b\"c"])'
QWEN_LOOK = """<function=look>
<parameter=at>
007
</parameter>
<parameter=n>
5
</parameter>
<parameter=on>
true
</parameter>
<parameter=tags>
["a", "b\\"c"]
</parameter>
</function>"""
GLM_LOOK = """look
<arg_key>at</arg_key>
<arg_value>007</arg_value>
<arg_key>n</arg_key>
<arg_value>5</arg_value>
<arg_key>on</arg_key>
<arg_value>true</arg_value>
<arg_key>tags</arg_key>
<arg_value>["a", "b\\"c"]</arg_value>
"""
GEMMA_LOOK = '{at:"007",n:5,on:true,tags:["a","b#c"]}'.replace('"', "<escape>").replace("#", '"')


def invoked(prefix: str, stated: bool = False) -> str:
    """The call of `look` in tags with the name as an attribute."""
    types = {"at": "true", "n": "false", "on": "false", "tags": "false"}
    values = {"at": "007", "n": "5", "on": "true", "tags": '["a", "b\\"c"]'}
    lines = [
        f'<{prefix}parameter name="{key}"{f" string={json.dumps(types[key])}" if stated else ""}>{value}</{prefix}parameter>'
        for key, value in values.items()
    ]
    return "\n".join([f'<{prefix}invoke name="look">', *lines, f"</{prefix}invoke>"])


def of(key: str, name: str, arguments: str, name_key: str = "name") -> str:
    return f'{{"{name_key}": "{name}", "{key}": {arguments}}}'


A_LOOK, A_GO = of("arguments", "look", JSON_LOOK), of("arguments", "go", "{}")
P_LOOK, P_GO = of("parameters", "look", JSON_LOOK), of("parameters", "go", "{}")
C_LOOK, C_GO = of("parameters", "look", JSON_LOOK, "tool_name"), of("parameters", "go", "{}", "tool_name")
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
STEP = "<｜tool_call_begin｜>function<｜tool_sep｜>{}<｜tool_call_end｜>"
SOLAR = "<|tool_call:begin|>0<|tool_call:name|>{}<|tool_call:args|>{}<|tool_call:end|>"
DSML = "｜DSML｜"
LLAMA_3 = "{{ tools }}<|start_header_id|>ipython Environment: ipython, parameters"

# name of the case -> part of the template, and both calls as the family writes them
FAMILIES: dict[str, tuple[str, str]] = {
    "hermes": ("<tool_call></tool_call>", f"<tool_call>\n{A_LOOK}\n</tool_call>\n<tool_call>\n{A_GO}\n</tool_call>"),
    "hermes_list": ("<tool_call></tool_call>", f"<tool_call>\n[{A_LOOK}, {A_GO}]\n</tool_call>"),
    "hermes_unclosed": ("<tool_call></tool_call>", f"<tool_call>\n{A_LOOK}\n<tool_call>\n{A_GO}\n</tool_call>"),
    "qwen3_coder": (
        "<tool_call>\n<function=name>\n<parameter=key>",
        f"<tool_call>\n{QWEN_LOOK}\n</tool_call>\n<tool_call>\n<function=go>\n</function>\n</tool_call>",
    ),
    "qwen3_coder_unopened": (
        "<tool_call>\n<function=name>\n<parameter=key>", f"{QWEN_LOOK}\n</tool_call>\n<tool_call>\n<function=go></function>\n</tool_call>",
    ),
    "qwen3_coder_json": (
        "<tool_call>\n<function=name>\n<parameter=key>", f"<tool_call>{A_LOOK}</tool_call><tool_call>{A_GO}</tool_call>",
    ),
    "seed_oss": (
        "{% set begin = '<seed:tool_call>' %}<function=name><parameter=key>",
        f"<seed:tool_call>\n{QWEN_LOOK}\n</seed:tool_call>\n<seed:tool_call>\n<function=go>\n</function>\n</seed:tool_call>",
    ),
    "glm": ("<tool_call>name\n<arg_key>", f"<tool_call>{GLM_LOOK}</tool_call>\n<tool_call>go\n</tool_call>"),
    "hunyuan_v3": (
        "<tool_calls><tool_call>name<tool_sep><arg_key>",
        f"<tool_calls>\n<tool_call>{GLM_LOOK.replace('look', 'look<tool_sep>')}</tool_call>\n<tool_call>go<tool_sep>\n</tool_call>\n</tool_calls>",
    ),
    "minimax_m2": (
        "<minimax:tool_call><invoke name=", f'<minimax:tool_call>\n{invoked("")}\n<invoke name="go">\n</invoke>\n</minimax:tool_call>',
    ),
    "minimax_m1": (r"<tool_calls>\n{\"name\"", f"<tool_calls>\n{A_LOOK}\n{A_GO}\n</tool_calls>"),
    "step3": (
        '<steptml:invoke name="',
        f"<｜tool_calls_begin｜>\n{STEP.format(invoked('steptml:'))}\n"
        + STEP.format('<steptml:invoke name="go">\n</steptml:invoke>') + "\n<｜tool_calls_end｜>",
    ),
    "deepseek_v3.2": (
        '{% set dsml = "｜DSML｜" %}<{{ dsml }}invoke name=',
        f'<{DSML}function_calls>\n{invoked(DSML, stated=True)}\n<{DSML}invoke name="go">\n</{DSML}invoke>\n</{DSML}function_calls>',
    ),
    "deepseek_r1": (
        "<｜tool▁calls▁begin｜>```json",
        f"<｜tool▁calls▁begin｜>{R1.format('look', JSON_LOOK)}\n{R1.format('go', '{}')}<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3.1": (
        "<｜tool▁calls▁begin｜>", f"<｜tool▁calls▁begin｜>{V31.format('look', JSON_LOOK)}{V31.format('go', '{}')}<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{KIMI.format('look', 0, JSON_LOOK)}{KIMI.format('go', 1, '{}')}<|tool_calls_section_end|>",
    ),
    "solar": ("<|tool_call:begin|>", f"<|tool_calls|>{SOLAR.format('look', JSON_LOOK)}{SOLAR.format('go', '{}')}<|calls|>"),
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS] [{A_LOOK}, {A_GO}]"),
    "mistral_named": ("[TOOL_CALLS]name[ARGS]", f"[TOOL_CALLS]look[ARGS]{JSON_LOOK}[TOOL_CALLS]go[ARGS]{{}}"),
    "mistral_ids": (
        "[TOOL_CALLS]name[CALL_ID]id[ARGS]", f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{JSON_LOOK}[TOOL_CALLS]go[CALL_ID]abcdefghj[ARGS]{{}}",
    ),
    "llama3": (LLAMA_3, f"{P_LOOK}; {P_GO}"),
    "llama3_arguments": (LLAMA_3, f"<|python_tag|>{A_LOOK}; {A_GO}"),
    "llama3_lines": (LLAMA_3, f"{P_LOOK}\n{P_GO}"),
    "llama3.2_pythonic": ("<|start_header_id|>ipython [func_name1(params_name1=value)]", f"[{PYTHON_LOOK}, go()]"),
    "llama4": ("<|header_start|>ipython", f"<|python_start|>[{PYTHON_LOOK}, go()]<|python_end|>"),
    "llama4_bare": ("<|header_start|>ipython", f"[{PYTHON_LOOK}, go()]"),
    "llama4_json": ("<|header_start|>ipython", f"{P_LOOK}\n{P_GO}"),
    "toolace": ("[func_name1(params_name1=params_value1), func_name2(params)]", f"[{PYTHON_LOOK}, go()]"),
    "lfm2": ("<|tool_list_start|>", f"<|tool_call_start|>[{PYTHON_LOOK}, go()]<|tool_call_end|>"),
    "lfm2_json": ("<|tool_call_start|>", f"<|tool_call_start|>[{A_LOOK}, {A_GO}]<|tool_call_end|>"),
    "minicpm3": ("<|tool_call_start|>", f"<|tool_call_start|>\n```python\n{PYTHON_LOOK}\ngo()\n```\n<|tool_call_end|>"),
    "minicpm5": (
        '<function name="', '<function name="look"><param name="at">007</param><param name="n">5</param><param name="on">true'
        '</param><param name="tags">["a", "b\\"c"]</param></function><function name="go"></function>',
    ),
    "olmo3": ("<function_calls></function_calls>", f"<function_calls>{PYTHON_LOOK}\ngo()</function_calls>"),
    "gemma3": ("```tool_code", f"```tool_code\nprint({PYTHON_LOOK})\nprint(default_api.go())\n```"),
    "function_gemma": (
        "<start_function_call>", f"<start_function_call>call:look{GEMMA_LOOK}<end_function_call><start_function_call>call:go{{}}<end_function_call>",
    ),
    "gemma4": (
        "<|tool_call>", f"<|tool_call>call:look{GEMMA_LOOK}<tool_call|><|tool_call>call:go{{}}<tool_call|>".replace("<escape>", '<|"|>'),
    ),
    "granite3": ("<|tool_call|>", f"<|tool_call|>[{A_LOOK}, {A_GO}]"),
    "granite_20b": ("<function_call>", f"<function_call> {A_LOOK}\n<function_call> {A_GO}"),
    "phi4_mini": ("<|tool|>{{ tools }}<|/tool|>", f"<|tool_call|>[{A_LOOK}, {A_GO}]<|/tool_call|>"),
    "phi4_functools": ("formatted as functools[", f"functools[{A_LOOK}, {A_GO}]"),
    "command_a": ("<|START_ACTION|>", f"<|START_ACTION|>[\n    {C_LOOK},\n    {C_GO}\n]<|END_ACTION|>"),
    "command_r": ("Action: tool_name", f"Action: ```json\n[\n    {C_LOOK},\n    {C_GO}\n]\n```"),
    "internlm": (
        "<|action_start|><|plugin|>", f"<|action_start|><|plugin|>\n{P_LOOK}<|action_end|><|action_start|><|plugin|>\n{A_GO}<|action_end|>",
    ),
    "jamba": ("<tool_calls></tool_calls>", f"<tool_calls>[\n{A_LOOK},\n{A_GO}\n]</tool_calls>"),
    "nemotron": ("<TOOLCALL></TOOLCALL>", f"<TOOLCALL>[{A_LOOK}, {A_GO}]</TOOLCALL>"),
    "apertus": ("<|tools_prefix|>", f'<|tools_prefix|>[{{"look": {JSON_LOOK}}}, {{"go": {{}}}}]<|tools_suffix|>'),
    "longcat": (
        "<longcat_tool_call>", f"<longcat_tool_call>\n{A_LOOK}\n</longcat_tool_call>\n<longcat_tool_call>\n{A_GO}\n</longcat_tool_call>",
    ),
    "llama3_functions": ("<function=name>{}</function>", f"<function=look>{JSON_LOOK}</function>\n<function=go>{{}}</function>"),
    "xlam": ('a single JSON array: [{"name": "f", "arguments": {}}]', f"[{A_LOOK}, {A_GO}]"),
}  # fmt: skip
BARE = {name for name in FAMILIES if name.startswith(("llama3", "llama4_", "toolace", "xlam", "minicpm5"))} - {
    "llama3_arguments"
}
UNOPENED = {"qwen3_coder_unopened"}


@pytest.fixture(scope="module")
def nano() -> PreTrainedTokenizerBase:
    return load_tokenizer("nano", "MODEL")


def message(template: str, *pieces: str, tools: Any = TOOLS, prompt: str = "") -> tuple[str, list[Any], str]:
    """Content, (name, arguments) of the calls, and reasoning; the calls are as OpenAI's clients expect them."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    reader = TagParser.for_template("{{ tools }}" + template, schemas, prompt)
    assert reader is not None
    deltas = [*map(reader.feed, pieces), reader.finish()]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert [call["index"] for call in calls] == [*range(len(calls))]
    assert len({call["id"] for call in calls}) == len(calls)
    functions = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    assert all(isinstance(arguments, dict) for _, arguments in functions)
    return "".join(d.content for d in deltas), functions, "".join(d.reasoning for d in deltas)


def pieces(text: str, seed: int) -> list[str]:
    chance, found = random.Random(seed), []
    while text:
        size = chance.choice((1, 2, 3, 7, 20))
        found.append(text[:size])
        text = text[size:]
    return found


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
    (HERMES, "<tool_call>{'name': 'look', 'arguments': {'at': 'it\\'s', 'on': True}}</tool_call>", [("look", {"at": "it's", "on": True})], ""),
    (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "x", "n": None,},}</tool_call>', [("look", {"at": "x", "n": None})], ""),
    (HERMES, '<tool_call>{name: "look", arguments: {at: "x"}}</tool_call>', [("look", {"at": "x"})], ""),
    (HERMES, '<tool_call>{"name": "look", "arguments": "{\\"at\\": \\"x\\"}"}</tool_call>', [("look", {"at": "x"})], ""),
    (HERMES, '<tool_call>{"name": "go", "arguments": null}</tool_call>', [GO], ""),
    (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "a\nb"}}</tool_call>', [("look", {"at": "a\nb"})], ""),
    (HERMES, '<tool_call>```json\n{"name": "go"}\n```</tool_call>', [GO], ""),
    (HERMES, '<tool_call>{"type": "function", "function": {"name": "go", "arguments": {}}}</tool_call>', [GO], ""),
    (HERMES, '<tool_call>{"name": "functions.go", "parameters": {}}</tool_call>', [GO], ""),
    (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "\\ud83d"}}</tool_call>', [("look", {"at": "\ud83d"})], ""),
    (HERMES, '<tool_call>{"name": "go", "arguments": [1]}</tool_call>', [], '<tool_call>{"name": "go", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "go", "arguments": {"x": 1e999}}</tool_call>', [], '<tool_call>{"name": "go", "arguments": {"x": 1e999}}</tool_call>'),
    # strings that look like tags, and tags without their partners
    (HERMES, '<tool_call>{"name": "look", "arguments": {"at": "<tool_call>}]"}}</tool_call> b', [("look", {"at": "<tool_call>}]"})], "b"),
    (HERMES, '<tool_call>{"name": "go"}\nThere.', [GO], "There."),
    (HERMES, 'Say <tool_call> so.\n<tool_call>{"name": "go"}</tool_call>', [GO], "Say <tool_call> so."),
    (HERMES, '<tool_call>{"name": "go"</tool_call><tool_call>{"name": "go"}</tool_call>', [GO], '<tool_call>{"name": "go"</tool_call>'),
    (MISTRAL, '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "[TOOL_CALLS]"}}] ok', [("look", {"at": "[TOOL_CALLS]"})], "ok"),
    (MISTRAL, '[TOOL_CALLS] [{"name": "go", "id": "123456789"}][TOOL_CALLS] [{"name": "go"}]', [GO, GO], ""),
    (MISTRAL, "[TOOL_CALLS] none, [1] says", [], "[TOOL_CALLS] none, [1] says"),
    # types by the schema
    (QWEN, "<tool_call>\n<function=look>\n<parameter=at>\n5\n</parameter>\n<parameter=n>\n-7\n</parameter>\n</function>\n</tool_call>", [("look", {"at": "5", "n": -7})], ""),
    (QWEN, "<tool_call><function=look><parameter=at>true</parameter><parameter=on>True</parameter></function></tool_call>", [("look", {"at": "true", "on": True})], ""),
    (QWEN, "<tool_call><function=look><parameter=at>\n def f():\n  return '</tool_call>'\n\n</parameter></function></tool_call>!", [("look", {"at": " def f():\n  return '</tool_call>'\n"})], "!"),
    (QWEN, "<tool_call><function=look><parameter=at>{}</parameter><parameter=tags>['x', \"y\"]</parameter></function></tool_call>", [("look", {"at": "{}", "tags": ["x", "y"]})], ""),
    (QWEN, "<tool_call><function=look><parameter=at>x</parameter><parameter=n>many</parameter></function></tool_call>", [("look", {"at": "x", "n": "many"})], ""),
    (QWEN, "<tool_call><function=look><parameter=at>x\n<parameter=n>5\n</function></tool_call>", [("look", {"at": "x", "n": 5})], ""),
    (QWEN, "<tool_call><function=look>why<parameter=at>x</parameter></function></tool_call>", [], "<tool_call><function=look>why<parameter=at>x</parameter></function></tool_call>"),
    (GLM, "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n<arg_value>12</arg_value>\n</tool_call>", [("look", {"at": "12", "n": 12})], ""),
    (GLM, "<tool_call>look<arg_key>at</arg_key><arg_value></tool_call></arg_value></tool_call>", [("look", {"at": "</tool_call>"})], ""),
    # Python's calls
    (PYTHONIC, "[look('x', 5), go()]", [("look", {"at": "x", "n": 5}), GO], ""),
    (PYTHONIC, '[look(at="a]) b", tags=("p", "q"))]', [("look", {"at": "a]) b", "tags": ["p", "q"]})], ""),
    (PYTHONIC, "[look(at=where)]", [], "[look(at=where)]"),
    (PYTHONIC, "[look(at=\"x\" + 'y')]", [], "[look(at=\"x\" + 'y')]"),
    (PYTHONIC, "[look('a', 1, True, [], 'more')]", [], "[look('a', 1, True, [], 'more')]"),
    (PYTHONIC, "[1] says: [look(at)] is\n[see] it", [], "[1] says: [look(at)] is\n[see] it"),
    (LFM2, "<|tool_call_start|>[look(at='''a\n\"b\"''')]<|tool_call_end|>Looking.", [("look", {"at": 'a\n"b"'})], "Looking."),
    (LFM2, "<|tool_call_start|>[look(from_='x')]<|tool_call_end|>", [("look", {"from_": "x"})], ""),
    # answers that are no calls
    (LLAMA_3, '{"city": "Paris", "look": {"at": 1}}', [], '{"city": "Paris", "look": {"at": 1}}'),
    (LLAMA_3, 'As in\n```json\n{"name": "go", "parameters": {}}\n```', [], 'As in\n```json\n{"name": "go", "parameters": {}}\n```'),
    (LLAMA_3, "I go.\n\n" + P_GO + "\n", [GO], "I go."),
    (LLAMA_3, "int f()\n{ // don't\n}\n" + P_GO, [GO], "int f()\n{ // don't\n}"),
    (LLAMA_3, P_GO + "; then", [GO], "; then"),
    (FAMILIES["command_r"][0], "Action: I would say [so].", [], "Action: I would say [so]."),
]  # fmt: skip


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


HARMONY = "<|start|><|channel|><|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
CHANNELS: list[tuple[str, str, tuple[str, list[Any], str]]] = [
    ("", f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>", ("Yes.", [], "Hm, <b>.")),
    ("", f"{ANALYSIS}<|channel|>final<|message|>Yes.", ("Yes.", [], "Hm, <b>.")),
    (
        "", f"{ANALYSIS}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{JSON_LOOK}<|call|>",
        ("", [LOOK], "Hm, <b>."),
    ),
    ("", f" to=functions.look<|channel|>commentary json<|message|>{JSON_LOOK}", ("", [LOOK], "")),
    (
        "", "<|channel|>commentary<|message|>I go.<|end|><|start|>assistant<|channel|>commentary to=functions.go<|message|>{}",
        ("I go.", [GO], ""),
    ),
    ("<|start|>assistant<|channel|>final<|message|>", "Yes.<|end|>", ("Yes.", [], "")),
    ("<|start|>assistant", "Yes, <|message|> is a tag.", ("Yes, <|message|> is a tag.", [], "")),
    ("", "Plain <|channel|> text", ("Plain <|channel|> text", [], "")),
    (
        "", "<|channel|>commentary to=functions.rm<|message|>{}<|call|>",
        ("<|channel|>commentary to=functions.rm<|message|>{}<|call|>", [], ""),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "text", "expected"), CHANNELS, ids=[case[1][-40:] for case in CHANNELS])
def test_channels(prompt: str, text: str, expected: Any) -> None:
    assert message(HARMONY, text, prompt=prompt) == expected
    assert message(HARMONY, *text, prompt=prompt) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=look>", "<parameter=at>", "</parameter>", "</function>", "<arg_key>at</arg_key>",
    "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "look", "[ARGS]", "<|tool_call_start|>", "[look(at='x')]", "go()", A_GO,
    P_GO, JSON_LOOK, "{", "}", "[", "]", '"', "'", ";", ",", "\n", " ", "<", "```", "text", "<think>", "</think>",
    "<|channel|>", "<|message|>", "<|end|>", "final", " to=functions.go",
]  # fmt: skip
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


def test_the_parser_is_chosen_by_the_tokenizers_template(nano: PreTrainedTokenizerBase) -> None:
    nano.chat_template = "{{ tools }}" + QWEN
    nano.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|im_end|>", "<|call|>"]})
    reader = parser_for(nano, TOOLS)
    assert reader is not None and markers(nano) == {"<tool_call>", "</tool_call>"}
    made = [*reader.feed(FAMILIES["qwen3_coder"][1]).tool_calls, *reader.finish().tool_calls]
    assert json.loads(made[0]["function"]["arguments"]) == LOOK[1]
    nano.chat_template = "{{ tools }}" + HARMONY
    assert markers(nano) == {"<|call|>", "<|end|>"} and parser_for(nano, []) is not None


# The grammars: of families whose text above is the form that a grammar makes, in JSON's quotes
FORCED = [
    name for name in FAMILIES
    if name not in {
        "hermes_list", "hermes_unclosed", "qwen3_coder_unopened", "qwen3_coder_json", "mistral_ids", "llama3_arguments",
        "llama3_lines", "llama4", "llama4_json", "lfm2_json", "minicpm3", "gemma3", "phi4_functools", "internlm", "jamba",
        "command_a", "command_r",
    }
]  # fmt: skip
MORE_FORCED = {
    "gemma3": f"```tool_code\n{PYTHON_JSON}\ngo()\n```",
    "internlm": "".join(f"<|action_start|><|plugin|>\n{call}\n<|action_end|>" for call in (A_LOOK, A_GO)),
    "jamba": f"<tool_calls>[{A_LOOK}, {A_GO}]</tool_calls>",
    "command_a": '<|START_ACTION|>[\n    {"tool_call_id": "0", '
    f'{C_LOOK[1:]},\n    {{"tool_call_id": "1", {C_GO[1:]}\n]<|END_ACTION|>',
    "command_r": "Action: ```json\n[\n    "
    + ",\n    ".join(
        f'{{\n        "tool_name": "{name}",\n        "parameters": {arguments}\n    }}'
        for name, arguments in (("look", JSON_LOOK), ("go", "{}"))
    )
    + "\n]\n```",
}


def forced(family: str) -> str:
    text = MORE_FORCED.get(family, FAMILIES[family][1])
    return text.replace(PYTHON_LOOK, PYTHON_JSON).removesuffix("<|calls|>")


class Grammar:
    """The grammar of forced calls of a family, with a tokenizer that has some of its tags as tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, tools: Any = TOOLS, **more: Any):
        tokenizer.chat_template = "{{ tools }}" + template
        self.tokenizer, self.text = tokenizer, call_grammar(tokenizer, tools, **more)
        self.vocabulary = llguidance.hf.from_tokenizer(tokenizer)  # type: ignore[arg-type]

    def accepts(self, text: str) -> bool:
        matcher = llguidance.LLMatcher(self.vocabulary, self.text)
        assert not matcher.get_error(), f"{matcher.get_error()}\n{self.text}"
        ids: Any = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def special(tokens: list[str]) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer("nano", "MODEL")
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


@pytest.mark.parametrize("family", [*FORCED, *MORE_FORCED])
def test_a_grammar_makes_calls_as_the_family_writes_them(nano: PreTrainedTokenizerBase, family: str) -> None:
    template, text = FAMILIES[family][0], forced(family)
    assert message(template, text) == ("", [LOOK, GO], "")
    assert Grammar(nano, template).accepts(text)
    assert not Grammar(nano, template, parallel=False).accepts(text)
    assert not Grammar(nano, template, tools=TOOLS[:1]).accepts(text)
    assert not Grammar(nano, template, name="look").accepts(text)
    for wrong in (
        "",
        "Hello",
        f"I go. {text}",
        text.replace("look", "find"),
        text.replace("true", "1").replace("True", "1"),
    ):
        assert not Grammar(nano, template).accepts(wrong)
    wrong = text.replace('["a", "b', '["a", 7, "b').replace("tags:[", "tags:[7,")
    assert wrong != text and not Grammar(nano, template).accepts(wrong)


AT_X = '{"at": "x"}'
SINGLE = {
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "deepseek_r1": f"<｜tool▁calls▁begin｜>{R1.format('look', AT_X)}<｜tool▁calls▁end｜>",
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI.format('look', 0, AT_X)}<|tool_calls_section_end|>",
    "mistral_named": '[TOOL_CALLS]look[ARGS]{"at": "x"}',
    "lfm2": '<|tool_call_start|>[look(at="x")]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:look{at:<|"|>x<|"|>}<tool_call|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">x</parameter>\n</invoke>\n</minimax:tool_call>',
}
TOKENS = {
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "glm": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "deepseek_r1": [f"<｜tool▁{tag}｜>" for tag in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")],
    "kimi_k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "mistral_named": ["[TOOL_CALLS]", "[ARGS]"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>"],
}


@pytest.mark.parametrize("family", SINGLE)
def test_one_call_is_made_where_the_tags_are_tokens(family: str) -> None:
    template, tokenizer = FAMILIES[family][0], special(TOKENS[family])
    for more in ({}, {"parallel": False}, {"name": "look"}):
        grammar = Grammar(tokenizer, template, **more)
        assert grammar.accepts(SINGLE[family])
        assert grammar.accepts(forced(family)) == (not more)
        assert f"<[{tokenizer.convert_tokens_to_ids(TOKENS[family][0])}]>" in grammar.text
    assert message(template, SINGLE[family]) == ("", [("look", {"at": "x"})], "")
    assert markers(tokenizer) >= {*TOKENS[family]}


@pytest.mark.parametrize("family", [*FORCED, *MORE_FORCED])
def test_what_a_grammar_accepts_is_read_as_calls_of_the_schema(nano: PreTrainedTokenizerBase, family: str) -> None:
    """Random changes of an answer: those that the grammar still accepts are whole calls to the parser."""
    template, text = FAMILIES[family][0], forced(family)
    grammar, chance, accepted = Grammar(nano, template), random.Random(family), 0
    parts = [text[i : i + 9] for i in range(0, len(text), 3)] + [
        "<",
        "</",
        "x",
        "'",
        '"',
        "\\",
        "\n",
        " ",
        "7",
        "é",
        "}",
        ")",
    ]
    for _ in range(150):
        at = chance.randrange(len(text))
        changed = text[:at] + chance.choice(parts) + text[at + chance.randrange(4) :]
        if grammar.accepts(changed):
            accepted += 1
            content, calls, _ = message(template, changed)
            assert not content and calls, changed
            for name, arguments in calls:
                validate(arguments, SCHEMA if name == "look" else {})
    assert accepted, "no change was accepted, so nothing was tried"


STRINGS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 3},
        "many": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "required": ["unit", "code"],
}
STRING_TOOL = [{"type": "function", "function": {"name": "set", "parameters": STRINGS}}]


@pytest.mark.parametrize(
    ("family", "call", "parameter"),
    [
        ("qwen3_coder", "<tool_call>\n<function=set>\n{}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"),
        ("glm", "<tool_call>set\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="set">\n{}</invoke>\n</minimax:tool_call>', '<parameter name="{}">{}</parameter>\n'),
    ],
)  # fmt: skip
def test_strings_without_quotes_are_held_to_the_schema(
    nano: PreTrainedTokenizerBase, family: str, call: str, parameter: str
) -> None:
    template = FAMILIES[family][0]
    grammar = Grammar(nano, template, STRING_TOOL)
    for values, valid in (
        ({"unit": "c", "code": "AB/12"}, True),
        ({"unit": "f", "code": "AB/1", "short": "a\n", "many": '[{"x": 1.5}]'}, True),
        ({"unit": "k", "code": "AB/12"}, False),
        ({"unit": "c", "code": "AB/"}, False),
        ({"unit": "c"}, False),
        ({"unit": "c", "code": "AB/12", "short": "a"}, False),
        ({"unit": "c", "code": "AB/12", "short": "abcd"}, False),
        ({"unit": "c", "code": "AB/12", "many": '[{"x": "y"}]'}, False),
    ):
        text = call.replace("{}", "".join(parameter.format(*pair) for pair in values.items()))
        assert grammar.accepts(text) == valid, text
        ((name, arguments),) = message(template, text, tools=STRING_TOOL)[1]
        assert name == "set" and (not valid or validate(arguments, STRINGS) is None)


@pytest.mark.parametrize("family", ["qwen3_coder", "lfm2", "gemma4"])
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {"type": "string"}}}, "anyOf"),
        ({"properties": {"a": {"type": "string"}}, "dependentRequired": {}}, "dependentRequired"),
        ({"properties": {"a": {}}, "required": ["b"]}, "'b', which is none of its properties"),
        ({"properties": {"a b": {"type": "string"}}}, "a b cannot be written"),
    ],
)
def test_schemas_that_a_format_cannot_hold_are_refused(
    nano: PreTrainedTokenizerBase, family: str, schema: dict[str, Any], named: str
) -> None:
    tools = [{"type": "function", "function": {"name": "set", "parameters": schema}}]
    with pytest.raises(Refused, match=f"tool_choice: .*{named}"):
        Grammar(nano, FAMILIES[family][0], tools)
    assert Grammar(nano, FAMILIES["hermes"][0], tools)


def test_a_format_of_strings_is_refused_in_plain_text(nano: PreTrainedTokenizerBase) -> None:
    tools = [{"type": "function", "function": {"name": "set", "parameters": {"properties": {"a": {"type": "string", "format": "date"}}}}}]  # fmt: skip
    with pytest.raises(Refused, match=r"set.parameters.a has 'format'.*function_tags.*tool_choice='auto'"):
        Grammar(nano, FAMILIES["qwen3_coder"][0], tools)


def test_channels_are_forced_after_the_reasoning() -> None:
    call = f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{JSON_LOOK}"
    tokenizer = special(["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"])
    tokenizer.eos_token = "<|return|>"  # that of nano is the end of a message here
    grammar = Grammar(tokenizer, HARMONY)
    assert grammar.accepts(call) and grammar.accepts(ANALYSIS + call)
    assert not grammar.accepts("<|channel|>final<|message|>Yes.")
    assert not grammar.accepts(f"{call}<|call|><|start|>assistant{call}")
    assert message(HARMONY, ANALYSIS + call) == ("", [LOOK], "Hm, <b>.")
