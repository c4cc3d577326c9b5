"""Tool calls as the templates of the families write them, for tests of parsers and of grammars."""

from __future__ import annotations

import json
import random
from typing import Any

from truedraft.text.tool_calls import TagParser

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
    attribute = {key: f' string="{value}"' if stated else "" for key, value in types.items()}
    values = {"at": "007", "n": "5", "on": "true", "tags": '["a", "b\\"c"]'}
    lines = [
        f'<{prefix}parameter name="{key}"{attribute[key]}>{value}</{prefix}parameter>' for key, value in values.items()
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
        "<tool_call>\n<function=name>\n<parameter=key>",
        f"{QWEN_LOOK}\n</tool_call>\n<tool_call>\n<function=go></function>\n</tool_call>",
    ),
    "qwen3_coder_json": (
        "<tool_call>\n<function=name>\n<parameter=key>",
        f"<tool_call>{A_LOOK}</tool_call><tool_call>{A_GO}</tool_call>",
    ),
    "seed_oss": (
        "{% set begin = '<seed:tool_call>' %}<function=name><parameter=key>",
        f"<seed:tool_call>\n{QWEN_LOOK}\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=go>\n</function>\n</seed:tool_call>",
    ),
    "glm": ("<tool_call>name\n<arg_key>", f"<tool_call>{GLM_LOOK}</tool_call>\n<tool_call>go\n</tool_call>"),
    "hunyuan_v3": (
        "<tool_calls><tool_call>name<tool_sep><arg_key>",
        f"<tool_calls>\n<tool_call>{GLM_LOOK.replace('look', 'look<tool_sep>')}</tool_call>\n"
        "<tool_call>go<tool_sep>\n</tool_call>\n</tool_calls>",
    ),
    "minimax_m2": (
        "<minimax:tool_call><invoke name=",
        f'<minimax:tool_call>\n{invoked("")}\n<invoke name="go">\n</invoke>\n</minimax:tool_call>',
    ),
    "minimax_m1": (r"<tool_calls>\n{\"name\"", f"<tool_calls>\n{A_LOOK}\n{A_GO}\n</tool_calls>"),
    "step3": (
        '<steptml:invoke name="',
        f"<｜tool_calls_begin｜>\n{STEP.format(invoked('steptml:'))}\n"
        + STEP.format('<steptml:invoke name="go">\n</steptml:invoke>')
        + "\n<｜tool_calls_end｜>",
    ),
    "deepseek_v3.2": (
        '{% set dsml = "｜DSML｜" %}<{{ dsml }}invoke name=',
        f"<{DSML}function_calls>\n{invoked(DSML, stated=True)}\n"
        f'<{DSML}invoke name="go">\n</{DSML}invoke>\n</{DSML}function_calls>',
    ),
    "deepseek_r1": (
        "<｜tool▁calls▁begin｜>```json",
        f"<｜tool▁calls▁begin｜>{R1.format('look', JSON_LOOK)}\n{R1.format('go', '{}')}<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3.1": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁calls▁begin｜>{V31.format('look', JSON_LOOK)}{V31.format('go', '{}')}<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{KIMI.format('look', 0, JSON_LOOK)}"
        f"{KIMI.format('go', 1, '{}')}<|tool_calls_section_end|>",
    ),
    "solar": (
        "<|tool_call:begin|>",
        f"<|tool_calls|>{SOLAR.format('look', JSON_LOOK)}{SOLAR.format('go', '{}')}<|calls|>",
    ),
    "mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS] [{A_LOOK}, {A_GO}]"),
    "mistral_named": ("[TOOL_CALLS]name[ARGS]", f"[TOOL_CALLS]look[ARGS]{JSON_LOOK}[TOOL_CALLS]go[ARGS]{{}}"),
    "mistral_ids": (
        "[TOOL_CALLS]name[CALL_ID]id[ARGS]",
        f"[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{JSON_LOOK}[TOOL_CALLS]go[CALL_ID]abcdefghj[ARGS]{{}}",
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
        '<function name="',
        '<function name="look"><param name="at">007</param><param name="n">5</param><param name="on">true'
        '</param><param name="tags">["a", "b\\"c"]</param></function><function name="go"></function>',
    ),
    "olmo3": ("<function_calls></function_calls>", f"<function_calls>{PYTHON_LOOK}\ngo()</function_calls>"),
    "gemma3": ("```tool_code", f"```tool_code\nprint({PYTHON_LOOK})\nprint(default_api.go())\n```"),
    "function_gemma": (
        "<start_function_call>",
        f"<start_function_call>call:look{GEMMA_LOOK}<end_function_call><start_function_call>call:go{{}}<end_function_call>",
    ),
    "gemma4": (
        "<|tool_call>",
        f"<|tool_call>call:look{GEMMA_LOOK}<tool_call|><|tool_call>call:go{{}}<tool_call|>".replace(
            "<escape>", '<|"|>'
        ),
    ),
    "granite3": ("<|tool_call|>", f"<|tool_call|>[{A_LOOK}, {A_GO}]"),
    "granite_20b": ("<function_call>", f"<function_call> {A_LOOK}\n<function_call> {A_GO}"),
    "phi4_mini": ("<|tool|>{{ tools }}<|/tool|>", f"<|tool_call|>[{A_LOOK}, {A_GO}]<|/tool_call|>"),
    "phi4_functools": ("formatted as functools[", f"functools[{A_LOOK}, {A_GO}]"),
    "command_a": ("<|START_ACTION|>", f"<|START_ACTION|>[\n    {C_LOOK},\n    {C_GO}\n]<|END_ACTION|>"),
    "command_r": ("Action: tool_name", f"Action: ```json\n[\n    {C_LOOK},\n    {C_GO}\n]\n```"),
    "internlm": (
        "<|action_start|><|plugin|>",
        f"<|action_start|><|plugin|>\n{P_LOOK}<|action_end|><|action_start|><|plugin|>\n{A_GO}<|action_end|>",
    ),
    "jamba": ("<tool_calls></tool_calls>", f"<tool_calls>[\n{A_LOOK},\n{A_GO}\n]</tool_calls>"),
    "nemotron": ("<TOOLCALL></TOOLCALL>", f"<TOOLCALL>[{A_LOOK}, {A_GO}]</TOOLCALL>"),
    "apertus": ("<|tools_prefix|>", f'<|tools_prefix|>[{{"look": {JSON_LOOK}}}, {{"go": {{}}}}]<|tools_suffix|>'),
    "longcat": (
        "<longcat_tool_call>",
        f"<longcat_tool_call>\n{A_LOOK}\n</longcat_tool_call>\n<longcat_tool_call>\n{A_GO}\n</longcat_tool_call>",
    ),
    "llama3_functions": (
        "<function=name>{}</function>",
        f"<function=look>{JSON_LOOK}</function>\n<function=go>{{}}</function>",
    ),
    "xlam_llama": (
        '<|start_header_id|>ipython parameters. A single JSON array: [{"name": "f", "arguments": {}}]',
        f"[{A_LOOK}, {A_GO}]",
    ),
    "muse": (
        '<atem:function_calls>\n<atem:invoke name="$FUNCTION_NAME">',
        f'<atem:function_calls>\n{invoked("atem:")}\n<atem:invoke name="go">\n</atem:invoke>\n</atem:function_calls>',
    ),
    "xlam": ('a single JSON array: [{"name": "f", "arguments": {}}]', f"[{A_LOOK}, {A_GO}]"),
}
HARMONY = "<|start|><|channel|><|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"


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
