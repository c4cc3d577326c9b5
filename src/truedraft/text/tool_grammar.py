"""Grammars of answers: tool calls, for `tool_choice` "required" or a named function, and what comes before a text that
a constraint is for.

The syntax is the dialect of Lark that llguidance reads: texts in quotes, `<[id]>` for a special token, and `%json` with
a JSON schema. Calls have the spacing that models are trained on, so a constraint moves no token that needs no moving.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from truedraft.errors import Refused
from truedraft.text.templates import REASONING, template_of
from truedraft.text.tool_calls import THINK, Format, ended, format_of
from truedraft.text.tool_formats import HARMONY
from truedraft.text.tool_values import NAME, resolved, types_of

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FINAL = "<|channel|>final<|message|>"  # in front of the answer of gpt-oss
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
LINES = re.compile(r"\n+|[^\n]+")
PLACE = re.compile(r"‹(\w+)›")
NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}  # keywords that demand nothing
OF_OBJECTS = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
OF_STRINGS = NOTES | {"type", "minLength", "maxLength", "pattern"}
DEEPEST = 80  # characters of the name of a rule, which grows with each level


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
        Refused: the format of the template is unknown, it cannot hold calls to the schema of a tool, or no tool has
            this name.
    """
    template = template_of(tokenizer, True)
    form = format_of(template)
    if form is None or getattr(tokenizer, "response_template", None) is not None:
        raise Refused("tool_choice: the format of this model's tool calls is unknown; use 'auto' or 'none'")
    offered = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not offered:
        known = ", ".join(tool["function"]["name"] for tool in tools)
        raise Refused(f"tool_choice names {name!r}, which is none of the tools: there are {known or 'none'}")
    grammar = _Grammar(tokenizer, form)
    calls = grammar.calls(offered, parallel and name is None)
    around = form.reasoning or (THINK if THINK[1] in template else None)
    before = grammar.reasoning(prompt, *around) if around else ""
    return grammar.whole(f"{before} {calls}")


def answer_grammar(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = (), *, prompt: str = ""
) -> str | None:
    """The Lark grammar of answers whose text is constrained, in which `@body` is that text.

    Reasoning comes first, if the prompt has begun it or the chat template has a place for it; calls of tools are
    another answer.

    Args:
        tools: those that may be called, as in OpenAI's API.
        prompt: the text before the answer.

    Returns:
        None if the constrained text is all of the answer.

    Raises:
        Refused: the template does not say how reasoning ends, or how tools are called.
    """
    template = template_of(tokenizer, bool(tools))
    response: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    form = None if response is not None else format_of(template)
    if tools and form is None:
        raise Refused(
            "tools with a constraint of the answer: the format of this model's tool calls is unknown, so that none "
            "could be made; leave out one of them, or set tool_choice='none'"
        )
    own = form.reasoning if form is not None and form.reasoning else THINK if THINK[1] in template else None
    tags = own if response is None else _tags_of(response)
    if tags is None and not tools:
        return None
    grammar = _Grammar(tokenizer, form, tags or ())
    body = f"{grammar.text(FINAL if form is HARMONY else '')} @body"
    answer = f"({body} | {grammar.calls([tool['function'] for tool in tools], True)})" if tools else body
    return grammar.whole(f"{'' if tags is None else grammar.reasoning(prompt, *tags)} {answer}")


def _tags_of(response: Mapping[str, Any]) -> tuple[str, str] | None:
    """What begins and what ends the reasoning in a `response_template`; None if it has none.

    Raises:
        Refused: it is told by patterns.
    """
    fields: Mapping[str, Any] = response.get("fields") or {}
    field = next((fields[name] for name in REASONING if name in fields), None)
    if field is None:
        return None
    if not (isinstance(field.get("open"), str) and isinstance(field.get("close"), str)):
        raise Refused(
            "a constraint of the answer: this model's response_template tells reasoning by patterns, so that the "
            "constraint cannot begin where it ends; leave the constraint out"
        )
    return field["open"], field["close"]


class _Grammar:
    """The rules of calls in one format.

    Args:
        form: of the calls; None if there are to be none.
        tags: what begins and ends reasoning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: Format | None, tags: Collection[str] = THINK):
        self.tokenizer, self.rules = tokenizer, list[str]()
        self._form = form
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        known = sorted(added & {*(form.tags() if form else ()), *tags}, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, known)) or "(?!)")

    @property
    def form(self) -> Format:
        assert self._form is not None
        return self._form

    def whole(self, start: str) -> str:
        """The grammar whose texts are those of a rule."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, ""])

    def calls(self, functions: Sequence[Mapping[str, Any]], several: bool) -> str:
        """What calls one of these functions, or several in turn if the format has that, with the texts around."""
        calls = [self.call(i, function) for i, function in enumerate(functions)]
        self.rules.append(f"call: {' | '.join(calls)}")
        more = f"({self.text(self.form.between)} call)*" if several and self.form.between is not None else ""
        return f"{self.text(self.form.before)} call {more} {self.text(self.form.after)}"

    def text(self, text: str) -> str:
        """A text of the format: its tags as the tokenizer has them, the rest in quotes.

        Line breaks stand alone: the library's lexer takes the longest match, so a text that is the beginning of another
        one in the same place could not be told from it.
        """
        found, at = [], 0
        for tag in self._tags.finditer(text):
            found += [*map(_quoted, LINES.findall(text[at : tag.start()])), _tag(self.tokenizer, tag.group())]
            at = tag.end()
        return " ".join((*found, *map(_quoted, LINES.findall(text[at:]))))

    def filled(self, text: str, places: Mapping[str, str]) -> str:
        """A text of the format with rules, or other texts of the grammar, in its places."""
        parts = PLACE.split(text)  # texts and the names of places take turns
        written = [places[part] if i % 2 else self.text(part) for i, part in enumerate(parts)]
        return " ".join(filter(None, written))

    def rule(self, name: str, body: str, attribute: str = "") -> str:
        """Add a rule; its name."""
        self.rules.append(f"{name}{attribute}: {body}")
        return name

    def reasoning(self, prompt: str, opening: str, closing: str) -> str:
        """What may come before an answer, or must if the prompt has begun it; nothing if the prompt has ended it."""
        if ended(prompt, opening, closing):
            return ""
        end = self.text(closing)
        attribute = "[lazy]" if end.startswith('"') else ""  # up to the first closing tag, which the text may contain
        ends = f'{self.rule("thought", f"TEXT {end}", attribute)} "\\n"~0..2'
        self.rules.append("TEXT: /(.|\\n)*/")
        return ends if prompt.rstrip().endswith(opening) else f"({self.text(opening)} {ends})?"

    def call(self, number: int, function: Mapping[str, Any]) -> str:
        """The rule of calls of one tool; its schema is a root of its own, so that references within it hold."""
        given = function.get("parameters") or NO_PARAMETERS
        if not isinstance(given, dict):
            raise Refused(f"tool_choice: the parameters of {function['name']!r} are no JSON schema: give an object")
        schema = {"type": "object", **given}
        name, rule = function["name"], f"call_{number}"
        places = {"name": _quoted(name, escaped=True), "number": "/[0-9]{1,3}/"}
        if "‹parameters›" in self.form.call:
            if not re.fullmatch(NAME, name):
                raise Refused(f"tool_choice: {name!r} cannot be called in the format {self.form.name}: use 'auto'")
            places["parameters"] = _Parameters(self, schema, schema, f"{name}.parameters", f"{rule}_p").rule()
        else:
            places["arguments"] = f"%json {json.dumps(schema | {'x-guidance': SPACING})}"
        return self.rule(rule, self.filled(self.form.call, places))


class _Parameters:
    """The rules of an object whose parameters are written one by one.

    Args:
        schema: of the object.
        root: the schema in which references are looked up.
        place: of the schema, for messages.
        prefix: of the names of rules.
    """

    def __init__(self, grammar: _Grammar, schema: Mapping[str, Any], root: Mapping[str, Any], place: str, prefix: str):
        self.grammar, self.form, self.root, self.place, self.prefix = grammar, grammar.form, root, place, prefix
        self._only(schema, OF_OBJECTS, place)
        self.properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(self.properties, dict) or not isinstance(required, list):
            raise Refused(f"tool_choice: {place} is no JSON schema: give properties as an object, required as a list")
        self.required = {str(key) for key in required}
        if unknown := sorted(self.required - self.properties.keys()):
            raise Refused(
                f"tool_choice: {place} requires {unknown[0]!r}, which is none of its properties: add it there"
            )

    def rule(self) -> str:
        """The rule of all parameters, in the order of the schema."""
        keys = [*self.properties]
        rules = [self._parameter(i, key) for i, key in enumerate(keys)]
        comma = self.grammar.text(self.form.comma)
        for i in reversed(range(len(keys))):  # what may follow the parameters before this one
            following = f"{self.prefix}_more{i + 1}" if i + 1 < len(keys) else ""
            optional = "" if keys[i] in self.required else "?"
            self.grammar.rule(f"{self.prefix}_more{i}", f"({comma} {rules[i]}){optional} {following}")
        firsts = [key in self.required for key in keys].index(True) if self.required else len(keys)
        ways = [
            f"{rule} {self.prefix}_more{i + 1}" if i + 1 < len(keys) else rule
            for i, rule in enumerate(rules[: firsts + 1])
        ]
        return self.grammar.rule(self.prefix, " | ".join(ways if self.required else (*ways, '""')))

    def _parameter(self, number: int, key: str) -> str:
        place, name = f"{self.place}.{key}", f"{self.prefix}{number}"
        if not re.fullmatch(NAME, key):
            raise Refused(f"tool_choice: {place} cannot be written in the format {self.form.name}: use 'auto'")
        schema = self.properties[key]
        before, after = self.form.parameter.split("‹value›")
        stated = "true" if types_of(schema, self.root) == {"string"} else "false"
        value = self._value(schema, place, name, after)
        places = {"key": _quoted(key), "stated": _quoted(stated)}
        return self.grammar.rule(name, f"{self.grammar.filled(before, places)} {value}")

    def _value(self, schema: Any, place: str, name: str, after: str) -> str:
        """The rule of a value with the text after it."""
        end, quote = self.grammar.text(after), self.form.quote
        schema = resolved(schema, self.root)
        schema = schema if isinstance(schema, Mapping) else {}
        types = types_of(schema, self.root)
        if quote is None:
            python = types == {"boolean"} and not schema.keys() - NOTES - {"type"}
            return f'("True" | "False") {end}' if python else f"{self._json(schema)} {end}"
        if "enum" in schema or "const" in schema:
            self._only(schema, NOTES | {"type", "enum", "const"}, place)
            return f"({' | '.join(map(self._constant, schema.get('enum', [schema.get('const')])))}) {end}"
        if types is None or "string" in types:
            return self._string(schema, place, name, after)
        if quote and types & {"array", "object"}:
            return f"{self._nested(schema, place, name)} {end}"
        return f"{self._json(schema)} {end}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        known = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        return f"%json {json.dumps({**known, **schema, 'x-guidance': SPACING})}"

    def _constant(self, value: Any) -> str:
        quote = self.form.quote or ""
        return self.grammar.text(f"{quote}{value}{quote}") if isinstance(value, str) else _quoted(json.dumps(value))

    def _string(self, schema: Mapping[str, Any], place: str, name: str, after: str) -> str:
        """A text up to what ends it, which it cannot contain."""
        several = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ())]
        for part in several or [schema]:
            self._only(part, NOTES | {"type"} if several else OF_STRINGS, place)
        quote = self.form.quote or ""
        end = self.grammar.text(quote or after)
        closing = re.escape((quote or after).strip()).replace("/", r"\/")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        text = [rf"/(?s:.{{{least},{most}}})/", rf"~/(?s:.*){closing}(?s:.*)/"]
        if "pattern" in schema:
            text.append(f"/{_anywhere(schema['pattern'])}/")
        terminal = self.grammar.rule(name.upper(), " & ".join(text))
        body = self.grammar.rule(f"{name}_text", f"{terminal} {end}", "[lazy]" if end.startswith('"') else "")
        return f"{self.grammar.text(quote)} {body} {self.grammar.text(after)}" if quote else body

    def _nested(self, schema: Mapping[str, Any], place: str, name: str) -> str:
        """An object or a list in a format with its own quotes."""
        if len(name) > DEEPEST:
            raise Refused(f"tool_choice: {self.place} is nested too deeply for the format {self.form.name}: use 'auto'")
        if types_of(schema, self.root) == {"object"}:
            inner = _Parameters(self.grammar, schema, self.root, place, f"{name}_p").rule()
            return f'"{{" {inner} "}}"'
        self._only(schema, NOTES | {"type", "items"}, place)
        item = self._value(schema.get("items", {}), f"{place}.items", f"{name}_i", "")
        return f'"[" ({item} ("," {item})*)? "]"'

    def _only(self, schema: Mapping[str, Any], keywords: set[str], place: str) -> None:
        if unknown := sorted(schema.keys() - keywords):
            raise Refused(
                f"tool_choice: {place} has {unknown[0]!r}, to which calls in this model's format ({self.form.name}) "
                "cannot be held: leave it out of the schema, or use tool_choice='auto'"
            )


def _anywhere(pattern: str) -> str:
    """A pattern of JSON Schema, which may match anywhere, as one that matches a whole text; in Lark's slashes."""
    start, end = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if pattern.endswith("$") else "(?s:.*)")
    inner = pattern.removeprefix("^").removesuffix("$")
    return f"{start}(?:{inner}){end}".replace("/", r"\/")


def _tag(tokenizer: PreTrainedTokenizerBase, tag: str) -> str:
    """A tag in the grammar: as a token where it is a special one, which ordinary text never matches."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return f"<[{special[tag]}]>" if tag in special else _quoted(tag)


def _quoted(text: str, escaped: bool = False) -> str:
    """A text in the grammar; `escaped` as it stands in a JSON string."""
    return json.dumps(json.dumps(text)[1:-1] if escaped else text) if text else ""
