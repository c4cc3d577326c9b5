"""Grammars that make an answer a tool call, for `tool_choice` "required" or a named function.

The syntax is the dialect of Lark that llguidance reads: texts in quotes, `<[id]>` for a special token, and `%json` with
a JSON schema. Calls have the spacing that models are trained on, so a constraint moves no token that needs no moving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft.errors import Refused
from truedraft.text.templates import template_of
from truedraft.text.tool_calls import THINK, Format, format_of

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None = None,
    parallel: bool = True,
    prompt: str = "",
) -> str:
    """The Lark grammar of answers that call tools, in the format of the tokenizer's chat template.

    Args:
        tools: as in OpenAI's API.
        name: the only tool that may be called, once; None for any of them.
        parallel: whether there may be several calls, where the format has them.
        prompt: the text before the answer; where it has begun reasoning, the answer ends that first.

    Raises:
        Refused: the format of the template is unknown, or no tool has this name.
    """
    template = template_of(tokenizer, True)
    form = format_of(template)
    if form is None or getattr(tokenizer, "response_template", None) is not None:
        raise Refused("tool_choice: the format of this model's tool calls is unknown; use 'auto' or 'none'")
    offered = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not offered:
        known = ", ".join(tool["function"]["name"] for tool in tools)
        raise Refused(f"tool_choice names {name!r}, which is none of the tools: there are {known or 'none'}")
    several = parallel and name is None
    rules = [f"call_{i}: {_call(form, function)}" for i, function in enumerate(offered)]
    call = "call: " + " | ".join(f"call_{i}" for i in range(len(offered)))
    before, thought = _reasoning(tokenizer, prompt) if THINK[1] in template else ("", [])
    start = f"start: {before}{_calls(tokenizer, form, several)}"
    return "\n".join(["%llguidance {}", start, *thought, call, *rules, ""])


def _calls(tokenizer: PreTrainedTokenizerBase, form: Format, several: bool) -> str:
    """Calls with the texts around them."""
    if form.bare:
        return "call"
    opening, closing, gap = _tag(tokenizer, form.opening), _tag(tokenizer, form.closing), _quoted(form.gap)
    if form.listed:
        more = f"({_quoted(', ')} call)*" if several else ""
        return f'{opening} {gap} "[" call {more} "]" {closing}'
    one = f"{opening} {gap} call {gap} {closing}"
    return f"{one} ({gap} {one})*" if several else one


def _call(form: Format, function: Mapping[str, Any]) -> str:
    """A call of one tool; its schema is a root of its own, so that references within it hold."""
    head = f'{{"name": {json.dumps(function["name"])}, "{form.key}": '
    schema = {"type": "object", **(function.get("parameters") or NO_PARAMETERS), "x-guidance": SPACING}
    return f"{_quoted(head)} %json {json.dumps(schema)} {_quoted('}')}"


def _reasoning(tokenizer: PreTrainedTokenizerBase, prompt: str) -> tuple[str, list[str]]:
    """What may come before calls, or must after a prompt that has begun it, and its rules."""
    opening, closing = (_tag(tokenizer, tag) for tag in THINK)
    ends = 'thought "\\n"~0..2'
    before = f"{ends} " if prompt.rstrip().endswith(THINK[0]) else f"({opening} {ends})? "
    attribute = "[lazy]" if closing.startswith('"') else ""  # up to the first closing tag, which the text may contain
    return before, [f"thought{attribute}: TEXT {closing}", "TEXT: /(.|\\n)*/"]


def _tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """A tag in the grammar: as a token where it is a special one, which ordinary text never matches."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return f"<[{special[tag]}]>" if tag in special else _quoted(tag)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
