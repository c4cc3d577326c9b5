"""Tool calls and reasoning in generated text, as it is generated, in the form of OpenAI's streaming API.

A tokenizer with a `response_template` is read by transformers' own parser. For templates without one, the formats of
tool_formats.py are known by the template's text, each with `<think>...</think>` where the template has it. A call is
passed on when it is whole; what is no call of an offered tool stays content, with its tags, so that no text is lost.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from truedraft.text.templates import REASONING, template_of
from truedraft.text.tool_bodies import LIMIT, Body, Scan, Schemas, offered_call, part_of_tag
from truedraft.text.tool_formats import HARMONY, HERMES, LLAMA, MISTRAL, Format, format_of
from truedraft.text.tool_values import json_text

__all__ = [
    "HERMES", "LLAMA", "MISTRAL", "Delta", "Format", "ResponseTemplateParser", "TagParser", "ToolParser", "format_of",
    "markers", "parser_for",
]  # fmt: skip
THINK = ("<think>", "</think>")
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
ENDED = re.compile("|".join(map(re.escape, (*CHANNELS[:2], *CHANNELS[3:]))))  # what ends a message
HEADER = re.compile(
    r"\s*(?:<\|start\|>)?\s*(?:assistant)?(?:\s*to=[^\s<]+)?\s*(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
SEPARATORS = (",", ";")  # between calls


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
    """Splits the text of one answer; any division of the text into pieces gives the same message.

    Attributes:
        in_reasoning: whether the text so far ends within reasoning.
    """

    @property
    def in_reasoning(self) -> bool: ...

    def feed(self, text: str) -> Delta:
        """What a further piece of the answer completes."""

    def finish(self) -> Delta:
        """What was held back, at the end of the answer."""


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
    return TagParser.for_template(template, schemas_of(tools), prompt)


def ended(prompt: str, opening: str, closing: str) -> bool:
    """Whether a prompt has ended the reasoning that it has begun, as templates do for a model that is not to reason."""
    return re.search(rf"{re.escape(opening)}\s*{re.escape(closing)}\s*$", prompt) is not None


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The schemas of the parameters of tools in OpenAI's form, by name."""
    functions = [tool["function"] for tool in tools]
    given = {function["name"]: function.get("parameters") for function in functions}
    return {name: schema if isinstance(schema, Mapping) else {} for name, schema in given.items()}


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
    written = " ".join((*THINK, *(form.written() if form else ())))
    return frozenset(token for token in tokenizer.all_special_tokens if token in written)


class _Buffered(ABC):
    """A parser that reads what it can of a buffer."""

    _buffer = ""

    def feed(self, text: str) -> Delta:
        """What a further piece of the answer completes."""
        self._buffer += text
        return self._advance(final=False)

    def finish(self) -> Delta:
        """What was held back, at the end of the answer."""
        return self._advance(final=True)

    @abstractmethod
    def _advance(self, final: bool) -> Delta:
        """What the buffer completes; at the end all of it."""


class TagParser(_Buffered):
    """Calls of a `Format`, and reasoning between tags.

    Args:
        form: of calls; None for reasoning alone.
        names: tools that may be called, as a set or with the schemas of their parameters; a call of another is content.
        thinks: whether an answer may begin with reasoning.
        reasons: whether the prompt has begun it.
    """

    def __init__(self, form: Format | None, names: Collection[str] | Schemas, thinks: bool, reasons: bool = False):
        self.form, self.thinks = form, thinks
        self.schemas: Schemas = names if isinstance(names, Mapping) else {name: {} for name in names}
        self._tags = (*form.opening, *form.bare) if form else ()
        self._opens = re.compile("|".join(map(re.escape, self._tags)) or "(?!)")
        self._read = self._read_reasoning if reasons else self._read_start
        self._buffer = ""
        self._last = ""  # the end of the content, since the beginning of the answer or a call
        self._skips = reasons  # white space after a tag
        self._block = _Block()
        self._ids: set[str] = set()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._made: list[dict[str, Any]] = []

    @classmethod
    def for_template(
        cls, template: str, names: Collection[str] | Schemas, prompt: str = ""
    ) -> TagParser | ChannelParser | None:
        """A parser for a chat template; None where its format is unknown and it has no reasoning."""
        form, thinks = format_of(template), THINK[1] in template and not ended(prompt, *THINK)
        if form is HARMONY:
            return ChannelParser(names, prompt)
        form = form if names else None
        if form is None and not thinks:
            return None
        return cls(form, names, thinks, thinks and prompt.rstrip().endswith(THINK[0]))

    @property
    def in_reasoning(self) -> bool:
        return self._read == self._read_reasoning

    def _advance(self, final: bool) -> Delta:
        while True:
            if self._skips:
                self._buffer = self._buffer.lstrip()
                self._skips = not self._buffer
            in_block = self._read in (self._read_body, self._read_after)
            if not (self._buffer or (final and in_block)) or not self._read(final):
                break
        delta = Delta("".join(self._content), tuple(self._made), "".join(self._reasoning))
        self._content, self._reasoning, self._made = [], [], []
        return delta

    def _read_start(self, final: bool) -> bool:
        """Decide what an answer begins with; whether it is decided."""
        text = self._buffer.lstrip()
        if self.thinks and text.startswith(THINK[0]):
            self._buffer, self._skips, self._read = text.removeprefix(THINK[0]), True, self._read_reasoning
        elif not final and (not text or (self.thinks and THINK[0].startswith(text))):
            return False
        else:
            self._read = self._read_content
        return True

    def _read_reasoning(self, final: bool) -> bool:
        text, whole, rest = self._buffer.partition(THINK[1])
        kept = text.rstrip() if whole else text[: len(text) if final else _held_from(text, THINK[1:])]
        self._reasoning.append(kept)
        self._buffer = rest if whole else text[len(kept) :]
        if whole:
            self.thinks, self._skips, self._read = False, True, self._read_start
        return bool(whole)

    def _read_content(self, final: bool) -> bool:
        """Pass on the text before the next call; whether one may begin there."""
        text = self._buffer
        opening = next((found for found in self._opens.finditer(text) if self._may_open(found)), None)
        if opening is None:
            kept = text[: len(text) if final else _held_from(text, self._tags)]
            self._buffer = text[len(kept) :]
            self._add_content(kept)
            return False
        is_bare = opening.group() not in self.form.opening  # type: ignore[union-attr]
        kept, end = text[: opening.start()].rstrip(), opening.start() if is_bare else opening.end()
        self._add_content(kept)
        self._buffer = text[end:]
        self._block = _Block([(text[len(kept) : end], False)], least=len(opening.group()) if is_bare else 0)
        self._begin_body()
        return True

    def _may_open(self, found: re.Match[str]) -> bool:
        """Whether a tag begins a call: one without an opening must begin a line, and not one of a block of code."""
        if self.form is None or found.group() in self.form.opening:
            return True
        *lines, line = (self._last + self._buffer[: found.start()]).split("\n")
        return not line.strip() and not (lines and lines[-1].lstrip().startswith("```"))

    def _begin_body(self) -> None:
        assert self.form is not None
        stops = (*self.form.opening, *([self.form.closing] if self.form.closing else []))
        self._block.scans = [(body, body.scan(self.schemas, stops)) for body in self.form.bodies]
        self._read = self._read_body

    def _read_body(self, final: bool) -> bool:
        """Read a call, or a list of them; the block ends where there is none."""
        for body, scan in [*self._block.scans]:
            try:
                end = scan.end(self._buffer, final)
            except ValueError:
                self._block.scans.remove((body, scan))
                continue
            if end is not None:
                self._take(body, end)
                return True
        if not self._block.scans:
            self._end_block(self._block.least)
        return not self._block.scans

    def _take(self, body: Body, end: int) -> None:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        try:
            parts = body.read(text, self.schemas)
        except ValueError:
            parts = []
        calls = [call for _, call in parts if call is not None]
        self._block.held += [(part, True) for part, call in parts if call is None] if calls else [(text, True)]
        self._block.has_calls |= bool(calls)
        self._block.least, self._read = 0, self._read_after
        for call in calls:
            assert self.form is not None
            new = call.id if call.id and call.id not in self._ids else self.form.new_id()
            self._made.append(_made(len(self._ids), new, call.name, call.arguments))
            self._ids.add(new)

    def _read_after(self, final: bool) -> bool:
        """Read what comes after a call: its end, the end of the block, or a further call; whether it is decided."""
        assert self.form is not None
        closing = [self.form.closing] if self.form.closing else []
        signs = (*closing, *self.form.tails, *SEPARATORS)
        starts = tuple(start for body in self.form.bodies for start in body.starts(self.schemas))
        text, at, end = self._buffer, 0, 0
        while True:
            at += len(text[at:]) - len(rest := text[at:].lstrip())
            sign = next((sign for sign in signs if rest.startswith(sign)), None)
            if sign is None:
                break
            at += len(sign)
            end = end if sign in SEPARATORS else at
            if sign in closing:
                self._end_block(end)
                return True
        if rest.startswith(starts):
            self._block.held.append((text[:at], False))
            self._buffer = rest
            self._begin_body()
        elif not final and any(sign.startswith(rest) for sign in (*signs, *starts)):
            return False
        else:
            self._end_block(end)
        return True

    def _end_block(self, end: int) -> None:
        """End a block at a place in the text: what was no call is content, or all of it where there was no call."""
        block = self._block
        block.held.append((self._buffer[:end], False))
        self._buffer, self._read = self._buffer[end:], self._read_content
        self._add_content("".join(text for text, is_body in block.held if is_body or not block.has_calls))
        if block.has_calls:
            self._last, self._skips = "", True

    def _add_content(self, text: str) -> None:
        self._content.append(text)
        self._last = (self._last + text)[-LIMIT:]


@dataclass
class _Block:
    """Calls that stand together, from an opening to its closing.

    held: texts that are content if no call is found, each with whether it was read as a call.
    least: characters of the buffer that are content in this case.
    scans: for the end of the next body.
    has_calls: whether a call of an offered tool was found.
    """

    held: list[tuple[str, bool]] = field(default_factory=list)
    least: int = 0
    scans: list[tuple[Body, Scan]] = field(default_factory=list)
    has_calls: bool = False


class ChannelParser(_Buffered):
    """Messages in channels, as gpt-oss writes them: reasoning in `analysis`, calls to a recipient, content in others.

    Args:
        names: tools that may be called, as a set or with the schemas of their parameters; a call of another is content.
        prompt: the text before the answer, which may have begun a message.
    """

    def __init__(self, names: Collection[str] | Schemas, prompt: str = ""):
        self.schemas: Schemas = names if isinstance(names, Mapping) else {name: {} for name in names}
        self._buffer = self._written = ""  # what is not read yet, and the header of the message as the answer has it
        self._in_header, self._call, self._field = True, "", "content"
        self._calls = 0
        self._found: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._ended: set[str] = set()  # fields that have the text of an earlier message
        self._made: list[dict[str, Any]] = []
        _, begun, header = prompt.rpartition(CHANNELS[0])
        has_ended = any(tag in header for tag in CHANNELS[3:])
        self._begun = header if begun and not has_ended else ""  # of the header, by the prompt
        if HEADER.search(self._begun):  # the prompt has begun the text, too
            self._begin(self._begun)

    @property
    def in_reasoning(self) -> bool:
        return not self._in_header and self._field == "reasoning"

    def _advance(self, final: bool) -> Delta:
        while self._read_header(final) if self._in_header else self._read_message(final):
            pass
        delta = Delta("".join(self._found["content"]), tuple(self._made), "".join(self._found["reasoning"]))
        self._found, self._made = {"content": [], "reasoning": []}, []
        return delta

    def _read_header(self, final: bool) -> bool:
        """Read up to the text of a message; whether it is there. A text without a header is content."""
        header = HEADER.match(self._begun + self._buffer[:LIMIT])
        if header:
            self._written = header.group()[len(self._begun) :]
            self._buffer = self._buffer[len(self._written) :]
            self._begin(header.group())
        elif len(self._buffer) >= LIMIT or (final and self._buffer):
            self._begin("")
            tag = ENDED.match(self._buffer)
            self._found["content"].append(tag.group() if tag else "")
            self._buffer = self._buffer[tag.end() if tag else 0 :]
        return not self._in_header

    def _begin(self, header: str) -> None:
        recipient = RECIPIENT.search(header)
        self._in_header, self._begun = False, ""
        self._call = recipient.group(1) if recipient else ""
        self._field = "reasoning" if f"{CHANNELS[1]}analysis" in header else "content"
        if header and self._field in self._ended and not self._call:
            self._found[self._field].append("\n")

    def _read_message(self, final: bool) -> bool:
        """Read the text of a message; whether it has ended."""
        end = ENDED.search(self._buffer)
        if self._call:
            if end is None and not final:
                return False
            self._take_call(end)
        else:
            at = end.start() if end else len(self._buffer) if final else _held_from(self._buffer, CHANNELS)
            self._found[self._field].append(self._buffer[:at])
            self._buffer = self._buffer[at:]
            self._ended |= {self._field} if at else set()
        if end is not None:
            self._buffer = self._buffer.removeprefix(end.group()) if end.group() in CHANNELS[3:] else self._buffer
            self._in_header, self._written = True, ""
        return end is not None

    def _take_call(self, end: re.Match[str] | None) -> None:
        at = end.start() if end else len(self._buffer)
        text, self._buffer = self._buffer[:at], self._buffer[at:]
        call = offered_call(self._call, text.strip(), self.schemas)
        if call is None:
            closing = end.group() if end and end.group() in CHANNELS[3:] else ""
            self._found["content"].append(f"{self._written}{text}{closing}")
        else:
            self._made.append(_made(self._calls, HARMONY.new_id(), call.name, call.arguments))
            self._calls += 1
        self._call, self._field = "", "content"


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
        self.schemas = schemas_of(tools)
        self._parser = ResponseParser(template, prefix=prompt, tools=self.tools)
        self._region = ""  # the field that the text so far ends in
        for event in self._parser.initial_events:
            self._follow(event)
        self._unread = ""  # text that is neither content, nor reasoning, nor part of a call that was made
        self._calls = 0

    @property
    def in_reasoning(self) -> bool:
        return self._region in REASONING

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
            self._parser, self._region = ResponseParser(self.template, prefix="", tools=self.tools), ""
            return Delta(self._rejected())

    def _follow(self, event: dict[str, Any]) -> None:
        self._region = "" if event["type"] == "region_close" else event["field"]

    def _event(self, event: dict[str, Any], latest: str) -> Delta:
        self._follow(event)
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
        found = [call["function"] for call in _listed(event["value"])]
        calls = [offered_call(call["name"], call["arguments"], self.schemas) for call in found]
        if not calls or None in calls:
            return Delta(self._rejected())
        made = [_made(self._calls + i, HERMES.new_id(), c.name, c.arguments) for i, c in enumerate(calls) if c]
        self._calls += len(calls)
        self._unread = read_on
        return Delta(tool_calls=tuple(made))

    def _rejected(self) -> str:
        text, self._unread = self._unread, ""
        return text


def _made(index: int, call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call in OpenAI's streaming form."""
    function = {"name": name, "arguments": json_text(arguments)}
    return {"index": index, "id": call_id, "type": "function", "function": function}


def _sum(deltas: Sequence[Delta]) -> Delta:
    calls = tuple(call for delta in deltas for call in delta.tool_calls)
    return Delta("".join(d.content for d in deltas), calls, "".join(d.reasoning for d in deltas))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _held_from(text: str, tags: Sequence[str]) -> int:
    """Where the end of a text begins that may belong to a tag: a beginning of one, and white space before it."""
    return len(text[: part_of_tag(text, tags)].rstrip()) if tags else len(text)
