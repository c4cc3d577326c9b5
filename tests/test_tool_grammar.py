"""Grammars that force tool calls, in the formats of the families: what they accept, refuse, and hold to the schema."""

from __future__ import annotations

import random
from typing import Any

import llguidance
import llguidance.hf
import pytest
from jsonschema import validate
from transformers import PreTrainedTokenizerBase

from tool_families import (
    A_GO,
    A_LOOK,
    ANALYSIS,
    C_GO,
    C_LOOK,
    FAMILIES,
    GO,
    HARMONY,
    JSON_LOOK,
    KIMI,
    LOOK,
    PYTHON_JSON,
    PYTHON_LOOK,
    R1,
    SCHEMA,
    TOOLS,
    message,
)
from truedraft import Refused
from truedraft.loading import load_tokenizer
from truedraft.text.tool_calls import markers
from truedraft.text.tool_grammar import call_grammar


@pytest.fixture(scope="module")
def nano() -> PreTrainedTokenizerBase:
    return load_tokenizer("nano", "MODEL")


# Families whose text in tool_families.py is the form that a grammar makes, but for quotes
FORCED = [
    name
    for name in FAMILIES
    if name
    not in {
        "hermes_list",
        "hermes_unclosed",
        "qwen3_coder_unopened",
        "qwen3_coder_json",
        "mistral_ids",
        "llama3_arguments",
        "llama3_lines",
        "llama4",
        "llama4_json",
        "lfm2_json",
        "minicpm3",
        "gemma3",
        "phi4_functools",
        "internlm",
        "jamba",
        "command_a",
        "command_r",
    }
]
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
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n'
    '<parameter name="at">x</parameter>\n</invoke>\n</minimax:tool_call>',
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
        (
            "qwen3_coder",
            "<tool_call>\n<function=set>\n{}</function>\n</tool_call>",
            "<parameter={}>\n{}\n</parameter>\n",
        ),
        ("glm", "<tool_call>set\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="set">\n{}</invoke>\n</minimax:tool_call>',
            '<parameter name="{}">{}</parameter>\n',
        ),
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
        ({"properties": {"a": {}}, "required": 5}, "set.parameters is no JSON schema"),
    ],
)
def test_schemas_that_a_format_cannot_hold_are_refused(
    nano: PreTrainedTokenizerBase, family: str, schema: dict[str, Any], named: str
) -> None:
    tools = [{"type": "function", "function": {"name": "set", "parameters": schema}}]
    with pytest.raises(Refused, match=f"tool_choice: .*{named}"):
        Grammar(nano, FAMILIES[family][0], tools)
    if schema.get("required") != 5:
        assert Grammar(nano, FAMILIES["hermes"][0], tools)


def test_a_format_of_strings_is_refused_in_plain_text(nano: PreTrainedTokenizerBase) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "set", "parameters": {"properties": {"a": {"type": "string", "format": "date"}}}},
        }
    ]
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


def test_schemas_that_lead_to_themselves_are_refused_where_they_cannot_be_written(
    nano: PreTrainedTokenizerBase,
) -> None:
    node = {"$ref": "#/$defs/n"}
    parameters = {"properties": {"a": node}, "$defs": {"n": {"type": "object", "properties": {"b": node}}}}
    tools = [{"type": "function", "function": {"name": "set", "parameters": parameters}}]
    with pytest.raises(Refused, match="nested too deeply for the format gemma4"):
        Grammar(nano, FAMILIES["gemma4"][0], tools)
    text = '<tool_call>\n<function=set>\n<parameter=a>\n{"b": {"b": {}}}\n</parameter>\n</function>\n</tool_call>'
    assert Grammar(nano, FAMILIES["qwen3_coder"][0], tools).accepts(text)
    assert message(FAMILIES["qwen3_coder"][0], text, tools=tools)[1] == [("set", {"a": {"b": {"b": {}}}})]


@pytest.mark.parametrize("schema", [{"enum": 5}, {"anyOf": 5}, {"allOf": 5}, {"type": 5}, 5, {"$ref": "#/x"}])
def test_a_schema_that_is_none_does_not_keep_a_call_from_being_read(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": schema}}}}]
    text = "<tool_call><function=look><parameter=at>x</parameter></function></tool_call>"
    assert message(FAMILIES["qwen3_coder"][0], text, tools=tools)[1] == [("look", {"at": "x"})]
