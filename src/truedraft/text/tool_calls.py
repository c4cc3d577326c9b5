"""Tool calls and reasoning in generated text, as it is generated, in the form of OpenAI's streaming API.

A tokenizer with a `response_template` is read by transformers' own parser. For templates without one, the formats that
are known by the template's text are read here: `<tool_call>{json}</tool_call>` of Hermes and Qwen, the JSON of Llama 3,
and `[TOOL_CALLS] [...]` of Mistral, each with `<think>...</think>` where the template has it. A call is passed on when
it is whole; whatever is no call of an offered tool stays content, with its tags, so that no text is lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from truedraft.text.templates import template_of

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of that field in response templates
THINK = ("<think>", "</think>")
ALPHANUMERIC = string.ascii_letters + string.digits


class Delta(NamedTuple):
    """What a piece of text adds to a message.

    content: of the answer; white space next to a tag belongs to the tag.
    tool_calls: whole calls, each `{"index", "id", "type": "function", "function": {"name", "arguments": JSON text}}`.
    reasoning: text for `reasoning_content`.
    """

    content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""


class ToolParser(Protocol):
    """Splits the text of one answer; any division of the text into pieces gives the same message."""

    def feed(self, text: str) -> Delta:
        """What a further piece of the answer completes."""

    def finish(self) -> Delta:
        """What was held back, at the end of the answer."""


@dataclass(frozen=True)
class Format:
    """How a template writes tool calls.

    name: of the format.
    opening, closing: texts around a call, or around all of them; without `closing` they end with the answer.
    key: of the arguments in the JSON of a call; next to `name`.
    listed: whether the calls are one JSON list.
    bare: whether an answer that begins with `{` is a call without `opening`.
    gap: between the texts and the JSON, as models write it.
    id_length: alphanumeric characters of ids that the template demands; None for OpenAI's form.
    """

    name: str
    opening: str
    closing: str = ""
    key: str = "arguments"
    listed: bool = False
    bare: bool = False
    gap: str = ""
    id_length: int | None = None

    def calls(self, body: str) -> list[tuple[str, dict[str, Any]]]:
        """Names and arguments of the calls in the text between the tags.

        Raises:
            ValueError: it is not JSON of this format.
        """
        try:
            found = json.loads(body, parse_constant=_no_json)
        except RecursionError as e:
            raise ValueError("nested too deeply") from e
        return [self._call(call) for call in (found if self.listed and isinstance(found, list) else [found])]

    def _call(self, call: Any) -> tuple[str, dict[str, Any]]:
        name, arguments = (call.get("name"), call.get(self.key, {})) if isinstance(call, dict) else (None, None)
        if (
            not isinstance(name, str)
            or not isinstance(arguments, dict)
            or call.keys() - {"name", "id", "type", self.key}
        ):
            raise ValueError("no call")
        return name, arguments

    def new_id(self) -> str:
        """A fresh id of a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(self.id_length))


HERMES = Format("hermes", "<tool_call>", "</tool_call>", gap="\n")
LLAMA = Format("llama3_json", "<|python_tag|>", key="parameters", bare=True)
MISTRAL = Format("mistral", "[TOOL_CALLS]", listed=True, gap=" ", id_length=9)


def format_of(template: str) -> Format | None:
    """The format of tool calls in a chat template, by its text; None where it is unknown."""
    if "<tool_call>" in template and not any(tag in template for tag in ("<function=", "<arg_key>")):
        return HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template and "[CALL_ID]" not in template:
        return MISTRAL
    if "<|start_header_id|>" in template and re.search(r"parameters\b", template) and "ipython" in template:
        return LLAMA
    return None


def parser_for(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]], prompt: str = ""
) -> ToolParser | None:
    """The parser of one answer by a tokenizer's format; None where that is unknown and the template has no reasoning.

    Args:
        tools: those that may be called, as in OpenAI's API; none where calls are to stay content.
        prompt: the text before the answer, which may have begun the reasoning.

    Raises:
        Refused: there is no chat template.
    """
    template = template_of(tokenizer, bool(tools))
    response: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if response is not None:
        return ResponseTemplateParser(response, tools, prompt)
    return TagParser.for_template(template, {tool["function"]["name"] for tool in tools}, prompt)


def markers(tokenizer: PreTrainedTokenizerBase, with_tools: bool = True) -> frozenset[str]:
    """Special tokens that the text for a parser must keep: those that begin or end calls and reasoning.

    Raises:
        Refused: there is no chat template.
    """
    response: dict[str, Any] | None = getattr(tokenizer, "response_template", None)
    if response is not None:
        written = json.dumps(response, ensure_ascii=False)
        return frozenset(
            token for token in tokenizer.all_special_tokens if token in written or re.escape(token) in written
        )
    form = format_of(template_of(tokenizer, with_tools))
    tags = {*THINK, *((form.opening, form.closing) if form else ())}
    return frozenset(tags & {*tokenizer.all_special_tokens})


class TagParser:
    """Calls of a `Format`, and reasoning between tags.

    Args:
        form: of calls; None for reasoning alone.
        names: tools that may be called; a call of another one is content.
        thinks: whether an answer may begin with reasoning.
        reasons: whether the prompt has begun it.
    """

    def __init__(self, form: Format | None, names: Collection[str], thinks: bool, reasons: bool = False):
        self.form, self.names, self.thinks = form, names, thinks
        self._read = self._read_reasoning if reasons else self._read_start
        self._buffer = self._opening = ""  # the opening of the call under way, with the white space before it
        self._skips = reasons  # white space after a tag
        self._calls = 0
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._made: list[dict[str, Any]] = []

    @classmethod
    def for_template(cls, template: str, names: Collection[str], prompt: str = "") -> TagParser | None:
        """A parser for a chat template; None where its format is unknown and it has no reasoning."""
        form, thinks = format_of(template) if names else None, THINK[1] in template
        if form is None and not thinks:
            return None
        return cls(form, names, thinks, thinks and prompt.rstrip().endswith(THINK[0]))

    def feed(self, text: str) -> Delta:
        """What a further piece of the answer completes."""
        self._buffer += text
        return self._advance(final=False)

    def finish(self) -> Delta:
        """What was held back, at the end of the answer."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> Delta:
        while True:
            if self._skips:
                self._buffer = self._buffer.lstrip()
                self._skips = not self._buffer
            ends_with_tag = final and self._read == self._read_call
            if not (self._buffer or ends_with_tag) or not self._read(final):
                break
        delta = Delta("".join(self._content), tuple(self._made), "".join(self._reasoning))
        self._content, self._reasoning, self._made = [], [], []
        return delta

    def _read_start(self, final: bool) -> bool:
        """Decide what an answer begins with; whether it is decided."""
        text = self._buffer.lstrip()
        if self.form is not None and self.form.bare and text.startswith("{"):
            self._opening, self._read = "", self._read_call
        elif self.thinks and text.startswith(THINK[0]):
            self._buffer, self._skips, self._read = text.removeprefix(THINK[0]), True, self._read_reasoning
        elif not final and (not text or (self.thinks and THINK[0].startswith(text))):
            return False
        else:
            self._read = self._read_content
        return True

    def _read_reasoning(self, final: bool) -> bool:
        if self._read_until(THINK[1], self._reasoning, final) is None:
            return False
        self.thinks, self._skips, self._read = False, True, self._read_start
        return True

    def _read_content(self, final: bool) -> bool:
        if self.form is None:
            self._content.append(self._buffer)
            self._buffer = ""
        elif (space := self._read_until(self.form.opening, self._content, final)) is not None:
            self._opening, self._read = space + self.form.opening, self._read_call
            return True
        return False

    def _read_until(self, tag: str, found: list[str], final: bool) -> str | None:
        """Append the text before a tag; the white space between, or None if the tag has not come."""
        text, whole, rest = self._buffer.partition(tag)
        kept = text.rstrip() if whole else text[: len(text) if final else _held_from(text, tag)]
        found.append(kept)
        self._buffer = rest if whole else text[len(kept) :]
        return text[len(kept) :] if whole else None

    def _read_call(self, final: bool) -> bool:
        assert self.form is not None
        body, closing, rest = _call_body(self._buffer, self.form.closing)
        if not closing and not final:
            return False
        try:
            calls = self.form.calls(body)
            if not calls or any(name not in self.names for name, _ in calls):
                raise ValueError("no call of an offered tool")
        except ValueError:
            self._content.append(self._opening + body + closing)
        else:
            self._made += [_made(self._calls + i, self.form.new_id(), *call) for i, call in enumerate(calls)]
            self._calls, self._skips = self._calls + len(calls), True
        self._buffer, self._read = rest, self._read_content
        return True


class ResponseTemplateParser:
    """The answer of a tokenizer with a `response_template`, read by transformers' parser.

    Args:
        template: the tokenizer's.
        tools: whose schemas give arguments their types; a call of another one is content.
        prompt: the text before the answer.
    """

    def __init__(self, template: dict[str, Any], tools: Sequence[Mapping[str, Any]], prompt: str):
        self.template = template
        self.tools: list[dict[str, Any] | Callable[..., Any]] = [dict(tool) for tool in tools]
        self.names = {tool["function"]["name"] for tool in tools}
        self._parser = ResponseParser(template, prefix=prompt, tools=self.tools)
        self._unread = ""  # text that is neither content, nor reasoning, nor part of a call that was made
        self._calls = 0

    def feed(self, text: str) -> Delta:
        """What a further piece of the answer completes."""
        return _sum([self._read(one) for one in text])

    def finish(self) -> Delta:
        """What was held back, at the end of the answer."""
        return self._read("")

    def _read(self, text: str) -> Delta:
        """What one character completes, or the end for no character; text that the parser cannot read is content."""
        self._unread += text
        try:
            events = self._parser.feed(text) if text else self._parser.finalize()[1]
            return _sum([self._event(event, text) for event in events])
        except (ValueError, KeyError, TypeError, RecursionError):
            self._parser = ResponseParser(self.template, prefix="", tools=self.tools)
            return Delta(self._rejected())

    def _event(self, event: dict[str, Any], latest: str) -> Delta:
        if event["type"] == "region_chunk" and not event["dirty"]:
            text = event["text"]
            self._unread = self._unread[self._unread.find(text) + len(text) :]
            if event["field"] in REASONING:
                return Delta(reasoning=text)
            return Delta(text if event["field"] == "content" else "")
        closed = event["type"] == "region_close"
        by_pattern = f"{'close' if closed else 'open'}_pattern" in self.template["fields"].get(event["field"], {})
        read_on = latest if by_pattern else ""  # the next character ends a pattern
        if event["type"] != "region_chunk" and event["field"] in REASONING:
            self._unread = read_on  # its tags are no content
        if not closed or event["field"] != "tool_calls":
            return Delta()
        calls = [call["function"] for call in _listed(event["value"])]
        if not calls or any(call["name"] not in self.names for call in calls):
            return Delta(self._rejected())
        made = [_made(self._calls + i, HERMES.new_id(), c["name"], c["arguments"]) for i, c in enumerate(calls)]
        self._calls += len(calls)
        self._unread = read_on
        return Delta(tool_calls=tuple(made))

    def _rejected(self) -> str:
        text, self._unread = self._unread, ""
        return text


def _made(index: int, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's streaming form."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _sum(deltas: Sequence[Delta]) -> Delta:
    calls = tuple(call for delta in deltas for call in delta.tool_calls)
    return Delta("".join(d.content for d in deltas), calls, "".join(d.reasoning for d in deltas))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _held_from(text: str, tag: str) -> int:
    """Where the end of a text begins that may belong to a tag: a beginning of the tag, and white space before it."""
    starts = range(max(len(text) - len(tag) + 1, 0), len(text))
    return len(text[: next((i for i in starts if tag.startswith(text[i:])), len(text))].rstrip())


def _call_body(text: str, tag: str) -> tuple[str, str, str]:
    """A text divided at the first closing tag that is in no JSON string; all of it, where there is none."""
    at = text.find(tag) if tag else -1
    while at >= 0 and re.sub(r"\\.", "", text[:at], flags=re.DOTALL).count('"') % 2:
        at = text.find(tag, at + 1)
    return (text[:at], tag, text[at + len(tag) :]) if at >= 0 else (text, "", "")


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
