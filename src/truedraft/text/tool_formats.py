"""The formats in which chat templates write tool calls, as data: texts around calls, how bodies are read and written.

A format is known by texts of the template. Sources: the templates that the families ship with their tokenizers.
"""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass
from typing import Any

from truedraft.text.tool_bodies import Body, Parameters, Values

TAG = re.compile(r"<[^\s<>‹›]+>|\[[A-Z_]+\]")
ALPHANUMERIC = string.ascii_letters + string.digits
JSON_CALL = '{"name": "‹name›", "arguments": ‹arguments›}'
JSON = (Values(),)


@dataclass(frozen=True)
class Format:
    """How a template writes tool calls.

    name: of the format.
    marks: groups of texts; a template that has all of a group is of this format.
    opening, closing: texts around a call, or around all of them; without `closing` they end with the last.
    bodies: how calls are read, the first that fits.
    bare: texts that begin a call without `opening`, at the beginning of the answer or of a line.
    tails: texts after a single call that belong to it.
    call: a call as it is written: ‹name›, with ‹arguments› as JSON, or ‹parameters›, each as `parameter`.
    before, between, after: the texts around and between all calls; `between` is None where there is only one.
    parameter: a parameter as it is written, with ‹key› and ‹value›.
    comma: between parameters.
    quote: around strings in parameters: None for JSON, empty for plain text.
    id_length: alphanumeric characters of ids that the template demands; None for OpenAI's form.
    reasoning: texts around it, where these are not the tags that templates of other formats share.
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    opening: tuple[str, ...] = ()
    closing: str = ""
    bodies: tuple[Body, ...] = JSON
    bare: tuple[str, ...] = ()
    tails: tuple[str, ...] = ("```",)
    call: str = JSON_CALL
    before: str = ""
    between: str | None = "\n"
    after: str = ""
    parameter: str = ""
    comma: str = ""
    quote: str | None = None
    id_length: int | None = None
    reasoning: tuple[str, str] | None = None

    def written(self) -> tuple[str, ...]:
        """The texts that hold the tags of this format."""
        around = (*self.opening, self.closing, *self.tails, *self.bare, self.before, self.after)
        return (*around, self.call, self.parameter, self.quote or "", *(self.reasoning or ()))

    def tags(self) -> set[str]:
        """The tags in these texts, which a tokenizer may have as one token."""
        return {tag for text in self.written() for tag in TAG.findall(text)}

    def new_id(self) -> str:
        """A fresh id of a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.id_length))


DSML = "｜DSML｜"  # before the tags of DeepSeek V3.2


def _function_tags(opening: str) -> Format:
    """The format of Qwen3-Coder and its kin: `<function=name>` and `<parameter=key>`, within a tag of the family."""
    closing = f"</{opening[1:]}"
    head, parameter = r"\s*<function=(?P<name>[^>\n]+)>", r"<parameter=(?P<key>[^>\n]+)>"
    body = Parameters(head, parameter, "</parameter>", "</function>", "<function=")
    return Format(
        "function_tags", ((opening, "<function="),), (opening,), closing, (body, *JSON), bare=("<function=",),
        call=f"{opening}\n<function=‹name›>\n‹parameters›</function>\n{closing}",
        parameter="<parameter=‹key›>\n‹value›\n</parameter>\n", quote="",
    )  # fmt: skip


def _invoke_tags(name: str, opening: tuple[str, ...], closing: str, prefix: str, **more: Any) -> Format:
    """Formats with `<invoke name="...">` and `<parameter name="...">`, of which the prefix is the family's."""
    first, last, end = f"<{prefix}invoke name=", f"</{prefix}parameter>", f"</{prefix}invoke>"
    attribute, mark = r'"?(?P<{}>[^">]+)"?', prefix if prefix == DSML else first
    stated = ' string="(?P<string>true|false)"' if prefix == DSML else ""
    body = Parameters(
        rf"\s*(?:<｜tool_call_begin｜>\s*(?:function)?\s*<｜tool_sep｜>\s*)?{first}{attribute.format('name')}>",
        rf"<{prefix}parameter name={attribute.format('key')}(?:{stated})?>",
        last, end, more.pop("first", first),
    )  # fmt: skip
    return Format(name, ((mark,),), opening, closing, (body, *JSON), quote="", **more)


PAIRS = Parameters(
    r"\s*(?:<tool_call>)?\s*(?P<name>[^\s<]+)\s*(?:<tool_sep>)?\s*(?=<arg_key>|</tool_call>)",
    r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>",
    "</arg_value>", "</tool_call>", "<tool_call>",
)  # fmt: skip
PAIR = "<arg_key>‹key›</arg_key>\n<arg_value>‹value›</arg_value>\n"
KIMI_HEAD = (
    r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+):\d+)\s*<\|tool_call_argument_begin\|>"
)
DEEPSEEK_HEAD = (
    r"\s*<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?"
)
SOLAR_HEAD = r"\s*<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>"
PYTHON: dict[str, Any] = {"call": "‹name›(‹parameters›)", "parameter": "‹key›=‹value›", "comma": ", "}
LISTED: dict[str, Any] = {"between": ", "}
MISTRAL_CALL = Values(r"\s*(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?")
FIELDS: dict[str, Any] = {"parameter": "‹key›:‹value›", "comma": ",", "between": ""}

HERMES = Format(
    "hermes", (("<tool_call>",),), ("<tool_call>",), "</tool_call>", call=f"<tool_call>\n{JSON_CALL}\n</tool_call>"
)
LLAMA = Format(
    "llama3_json", (("<|start_header_id|>", "ipython", "parameters"), ("<|python_tag|>",)), ("<|python_tag|>",),
    bare=("{", "["), call='{"name": "‹name›", "parameters": ‹arguments›}', between="; ",
)  # fmt: skip
MISTRAL = Format(
    "mistral", (("[TOOL_CALLS]",),), ("[TOOL_CALLS]",), bodies=(MISTRAL_CALL,), before="[TOOL_CALLS] [", after="]",
    id_length=9, **LISTED,
)  # fmt: skip
MISTRAL_NAMED = Format(
    "mistral_named", (("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]", "[CALL_ID]")), ("[TOOL_CALLS]",),
    bodies=(MISTRAL_CALL,), call="[TOOL_CALLS]‹name›[ARGS]‹arguments›", between="", id_length=9,
)  # fmt: skip
HARMONY = Format(
    "harmony", (("<|channel|>", "<|message|>", "<|start|>"),), tails=("<|call|>", "<|return|>"), between=None,
    reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    call="<|channel|>commentary to=functions.‹name› <|constrain|>json<|message|>‹arguments›",
)  # fmt: skip

FORMATS = (
    HARMONY,
    _function_tags("<seed:tool_call>"),
    _invoke_tags(
        "step3", ("<｜tool_calls_begin｜>",), "<｜tool_calls_end｜>", "steptml:", tails=("<｜tool_call_end｜>",),
        first="<｜tool_call_begin｜>", before="<｜tool_calls_begin｜>\n", after="\n<｜tool_calls_end｜>",
        call="<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="‹name›">\n‹parameters›</steptml:invoke><｜tool_call_end｜>',
        parameter='<steptml:parameter name="‹key›">‹value›</steptml:parameter>\n',
    ),
    _invoke_tags(
        "deepseek_v3.2", (f"<{DSML}function_calls>", f"<{DSML}tool_calls>"), f"</{DSML}function_calls>", DSML,
        tails=(f"</{DSML}tool_calls>",), before=f"<{DSML}function_calls>\n", after=f"\n</{DSML}function_calls>",
        call=f'<{DSML}invoke name="‹name›">\n‹parameters›</{DSML}invoke>',
        parameter=f'<{DSML}parameter name="‹key›" string="‹stated›">‹value›</{DSML}parameter>\n',
    ),
    _invoke_tags(
        "minimax_m2", ("<minimax:tool_call>",), "</minimax:tool_call>", "", before="<minimax:tool_call>\n",
        after="\n</minimax:tool_call>", call='<invoke name="‹name›">\n‹parameters›</invoke>',
        parameter='<parameter name="‹key›">‹value›</parameter>\n',
    ),
    _invoke_tags(
        "muse", ("<atem:function_calls>",), "</atem:function_calls>", "atem:", before="<atem:function_calls>\n",
        after="\n</atem:function_calls>", call='<atem:invoke name="‹name›">\n‹parameters›</atem:invoke>',
        parameter='<atem:parameter name="‹key›">‹value›</atem:parameter>\n',
    ),
    Format(
        "hunyuan_v3", (("<tool_calls>", "<arg_key>"),), ("<tool_calls>",), "</tool_calls>", (PAIRS,),
        before="<tool_calls>\n", after="\n</tool_calls>", call="<tool_call>‹name›<tool_sep>\n‹parameters›</tool_call>",
        parameter=PAIR, quote="",
    ),
    Format(
        "glm", (("<tool_call>", "<arg_key>"),), ("<tool_call>",), bodies=(PAIRS, *JSON), tails=("</tool_call>",),
        call="<tool_call>‹name›\n‹parameters›</tool_call>", parameter=PAIR, quote="",
    ),
    _function_tags("<tool_call>"),
    Format(
        "deepseek", (("<｜tool▁calls▁begin｜>", "```json"),), ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>",
        (Values(DEEPSEEK_HEAD, "<｜tool▁call▁begin｜>"),), tails=("```", "<｜tool▁call▁end｜>"),
        before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>‹name›\n```json\n‹arguments›\n```<｜tool▁call▁end｜>",
    ),
    Format(
        "deepseek_v3.1", (("<｜tool▁calls▁begin｜>",),), ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>",
        (Values(DEEPSEEK_HEAD, "<｜tool▁call▁begin｜>"),), tails=("```", "<｜tool▁call▁end｜>"), between="",
        before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
        call="<｜tool▁call▁begin｜>‹name›<｜tool▁sep｜>‹arguments›<｜tool▁call▁end｜>",
    ),
    Format(
        "kimi_k2", (("<|tool_calls_section_begin|>",), ("<|im_middle|>", "tool_declare")),
        ("<|tool_calls_section_begin|>",), "<|tool_calls_section_end|>",
        (Values(KIMI_HEAD, "<|tool_call_begin|>"),), tails=("<|tool_call_end|>",), between="",
        before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
        call="<|tool_call_begin|>functions.‹name›:‹number›<|tool_call_argument_begin|>‹arguments›<|tool_call_end|>",
    ),
    Format(
        "solar", (("<|tool_call:begin|>",),), ("<|begin|>assistant<|tool_calls|>", "<|tool_calls|>"), "<|calls|>",
        (Values(SOLAR_HEAD, "<|tool_call:begin|>"),), tails=("<|tool_call:end|>",), before="<|tool_calls|>", between="",
        call="<|tool_call:begin|>‹number›<|tool_call:name|>‹name›<|tool_call:args|>‹arguments›<|tool_call:end|>",
    ),
    MISTRAL_NAMED,
    MISTRAL,
    Format(
        "lfm2", (("<|tool_call_start|>",), ("<|tool_list_start|>",)), ("<|tool_call_start|>",), "<|tool_call_end|>",
        before="<|tool_call_start|>[", after="]<|tool_call_end|>", **PYTHON, **LISTED,
    ),
    Format(
        "apertus", (("<|tools_prefix|>",),), ("<|tools_prefix|>",), "<|tools_suffix|>", (Values(keyed=True),),
        before="<|tools_prefix|>[", after="]<|tools_suffix|>", call='{"‹name›": ‹arguments›}', **LISTED,
    ),
    Format(
        "nemotron", (("<TOOLCALL>",),), ("<TOOLCALL>",), "</TOOLCALL>", before="<TOOLCALL>[", after="]</TOOLCALL>",
        **LISTED,
    ),
    Format(
        "internlm", (("<|action_start|>",),), ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        "<|action_end|>", call=f"<|action_start|><|plugin|>\n{JSON_CALL}\n<|action_end|>", between="",
    ),
    Format(
        "command_a", (("<|START_ACTION|>",),), ("<|START_ACTION|>",), "<|END_ACTION|>", between=",\n    ",
        before="<|START_ACTION|>[\n    ", after="\n]<|END_ACTION|>",
        call='{"tool_call_id": "‹number›", "tool_name": "‹name›", "parameters": ‹arguments›}',
    ),
    Format(
        "command_r", (("Action:", "tool_name"),), ("Action:",), between=",\n    ",
        before="Action: ```json\n[\n    ", after="\n]\n```",
        call='{\n        "tool_name": "‹name›",\n        "parameters": ‹arguments›\n    }',
    ),
    Format(
        "gemma4", (("<|tool_call>",),), ("<|tool_call>",), "<tool_call|>",
        (Values(r"\s*call:(?P<name>[\w.\-]+)", delimiter='<|"|>'),),
        call="<|tool_call>call:‹name›{‹parameters›}<tool_call|>", quote='<|"|>', **FIELDS,
    ),
    Format(
        "function_gemma", (("<start_function_call>",),), ("<start_function_call>",), "<end_function_call>",
        (Values(r"\s*call:(?P<name>[\w.\-]+)", delimiter="<escape>"),),
        call="<start_function_call>call:‹name›{‹parameters›}<end_function_call>", quote="<escape>", **FIELDS,
    ),
    Format(
        "phi4_mini", (("<|/tool_call|>",), ("<|/tool|>",), ("functools[",)), ("<|tool_call|>", "functools"),
        "<|/tool_call|>", before="<|tool_call|>[", after="]<|/tool_call|>", **LISTED,
    ),
    Format("granite", (("<|tool_call|>",),), ("<|tool_call|>",), before="<|tool_call|>[", after="]", **LISTED),
    Format(
        "olmo3", (("<function_calls>",),), ("<function_calls>",), "</function_calls>", before="<function_calls>",
        after="</function_calls>", **PYTHON,
    ),
    Format(
        "minimax_m1", (("<tool_calls>\\n{",), ("<tool_calls>\n{",)), ("<tool_calls>",), "</tool_calls>",
        before="<tool_calls>\n", after="\n</tool_calls>",
    ),
    Format(
        "tool_calls_list", (("<tool_calls>",),), ("<tool_calls>",), "</tool_calls>", before="<tool_calls>[",
        after="]</tool_calls>", **LISTED,
    ),
    Format("granite_20b", (("<function_call>",),), ("<function_call>",), call=f"<function_call> {JSON_CALL}"),
    Format(
        "longcat", (("<longcat_tool_call>",),), ("<longcat_tool_call>",), "</longcat_tool_call>",
        call=f"<longcat_tool_call>\n{JSON_CALL}\n</longcat_tool_call>",
    ),
    HERMES,
    Format(
        "minicpm5", (("<function name=",),), ("<function_calls>",), "</function_calls>",
        (
            Parameters(
                r"\s*<function name=\"(?P<name>[^\">]+)\">", r'<param name="(?P<key>[^">]+)">',
                "</param>", "</function>", "<function name=",
            ),
        ),
        bare=("<function name=",), between="", call='<function name="‹name›">‹parameters›</function>',
        parameter='<param name="‹key›">‹value›</param>', quote="",
    ),
    Format(
        "function_json", (("<function=", "</function>"),), bare=("<function=",),
        bodies=(Values(r"\s*<function=(?P<name>[^>\n]+)>", "<function="),),
        tails=("</function>",), call="<function=‹name›>‹arguments›</function>",
    ),
    Format(
        "llama4", (("<|header_start|>",),), ("<|python_start|>", "<|python_tag|>"), "<|python_end|>", bare=("{", "["),
        before="[", after="]", **PYTHON, **LISTED,
    ),
    Format(
        "pythonic", (("func_name1(",), ("(params_name1=",), ("[func1(",)), ("<|python_tag|>",), bare=("[",),
        before="[", after="]", **PYTHON, **LISTED,
    ),
    Format("tool_code", (("tool_code",),), ("```tool_code",), before="```tool_code\n", after="\n```", **PYTHON),
    Format(
        "json_list", (('[{"name":',), ('[{\\"name\\":',)), bare=("[", "{"), before="[", after="]", **LISTED,
    ),
    LLAMA,
)  # fmt: skip


def format_of(template: str) -> Format | None:
    """The format of tool calls in a chat template, by its text; None where it is unknown."""
    return next((form for form in FORMATS if any(all(t in template for t in group) for group in form.marks)), None)
