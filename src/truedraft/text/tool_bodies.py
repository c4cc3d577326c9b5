"""How the text of a tool call is read, and where it ends in a text that grows.

Bodies are of two kinds: `Values` (JSON objects, Python calls, or a name in front of JSON arguments) and `Parameters`
(each between tags of its own, typed by the schema of the tool). Where a call ends depends only on the text up to there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from truedraft.text.tool_values import NAME, PythonCall, Reader, json_text, properties_of, typed

FENCE = r"\s*(?:```\w*\s*)?"  # of a block of code, around the calls of some models
NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters")  # keys of a call
OTHERS = {"id", "type", "index", "tool_call_id"}  # keys that say nothing about a call
KEYS = (*NAMES, *ARGUMENTS, *sorted(OTHERS), "function")
LIMIT = 200  # characters within which the beginning of a call shows that it is one
Schemas = Mapping[str, Mapping[str, Any]]  # the schemas of parameters by the names of the tools that may be called


class Call(NamedTuple):
    """A call of a tool: its name, its arguments, and the id that the text gives it, if any."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


class Scan(Protocol):
    """Finds the end of one body of a format in a text that grows."""

    def end(self, text: str, final: bool) -> int | None:
        """Where the body ends, None where that is not known yet.

        Raises:
            ValueError: no body of a call begins here.
        """


class Body(Protocol):
    """How the text of a call, or of a list of them, is read."""

    def starts(self, schemas: Schemas) -> tuple[str, ...]:
        """Texts of which one begins a further call after another."""

    def scan(self, schemas: Schemas, stops: Sequence[str]) -> Scan:
        """For one body; `stops` are texts that no body contains, but in strings."""

    def read(self, text: str, schemas: Schemas) -> list[tuple[str, Call | None]]:
        """Parts of the text, each with the call that it is of an offered tool, if it is one.

        Raises:
            ValueError: it cannot be read.
        """


@dataclass(frozen=True)
class Values:
    """Calls as JSON objects or in Python's syntax, single or in lists; or arguments as JSON, with the name in front.

    head: pattern of the text in front of arguments, with the group `name`, and `id` where the text has one.
    first: the text with which a head begins, where several calls may follow each other.
    keyed: whether an object has the name as its only key.
    delimiter: of strings, next to quotes.
    """

    head: str = ""
    first: str = ""
    keyed: bool = False
    delimiter: str = ""

    def starts(self, schemas: Schemas) -> tuple[str, ...]:
        called = tuple(f"{name}(" for name in (*schemas, "print"))
        return (*((self.first,) if self.first else ()), "{", "[", *called)

    def scan(self, schemas: Schemas, stops: Sequence[str]) -> Scan:
        return _ValueScan(self, schemas, stops)

    def read(self, text: str, schemas: Schemas) -> list[tuple[str, Call | None]]:
        head = re.match(rf"{self.head}\s*(?=\{{)", text, re.DOTALL) if self.head else None
        lead = head or re.match(FENCE, text)
        values = Reader(text, lead.end() if lead else 0, self.delimiter).values()
        if head is None:
            return [(part, self._call(value, schemas)) for value, part in values]
        ((arguments, _),) = values
        return [(text, offered_call(head["name"], arguments, schemas, head.groupdict().get("id") or ""))]

    def _call(self, value: Any, schemas: Schemas) -> Call | None:
        if isinstance(value, PythonCall):
            known = properties_of(schemas.get(_known(value.name, schemas), {}))
            named = dict(zip(known, value.unnamed, strict=False)) | value.named
            whole = len(named) == len(value.unnamed) + len(value.named)
            return offered_call(value.name, named, schemas) if whole else None
        if not isinstance(value, dict):
            return None
        if self.keyed and len(value) == 1:
            ((name, arguments),) = value.items()
            return offered_call(name, arguments, schemas)
        if isinstance(function := value.get("function"), dict):
            value = {key: item for key, item in value.items() if key != "function"} | function
        name_key = next((key for key in NAMES if key in value), NAMES[0])
        arguments_key = next((key for key in ARGUMENTS if key in value), ARGUMENTS[0])
        if value.keys() - OTHERS - {name_key, arguments_key}:
            return None
        return offered_call(value.get(name_key), value.get(arguments_key), schemas)


@dataclass(frozen=True)
class Parameters:
    """A call whose parameters are each between tags, as plain text.

    head: pattern of what comes first, with the group `name`.
    parameter: pattern of the text before a value, with the group `key`, and `string` where the text says the type.
    last: the tag that closes a parameter; one that is followed by neither a parameter nor the end belongs to the value.
    end: the tag that closes the call.
    first: the text with which a head begins, where several calls may follow each other.
    """

    head: str
    parameter: str
    last: str
    end: str
    first: str = ""

    def starts(self, schemas: Schemas) -> tuple[str, ...]:
        return (self.first,) if self.first else ()

    def scan(self, schemas: Schemas, stops: Sequence[str]) -> Scan:
        return _ParameterScan(self)

    def read(self, text: str, schemas: Schemas) -> list[tuple[str, Call | None]]:
        head = re.match(self.head, text)
        if head is None:
            raise ValueError("no name")
        body = text[head.end() :].rpartition(self.end)[0]
        schema = schemas.get(_known(head["name"], schemas), {})
        arguments: dict[str, Any] = {}
        at = 0
        another = re.sub(r"\?P<\w+>", "?:", self.parameter)
        value = rf"(?P<value>.*?)(?:{re.escape(self.last)}(?=\s*(?:{another}|\Z))|(?={another})|\Z)"
        for found in re.finditer(rf"\s*{self.parameter}{value}\s*", body, re.DOTALL):
            if found.start() != at or found["key"] in arguments:
                raise ValueError("text between parameters, or two of one name")
            arguments[found["key"]] = self._value(found, schema)
            at = found.end()
        if body[at:].strip():
            raise ValueError("text after the parameters")
        return [(text, offered_call(head["name"], arguments, schemas))]

    def _value(self, found: re.Match[str], schema: Mapping[str, Any]) -> Any:
        text = found["value"]
        if text.startswith("\n") or not found.group().rstrip().endswith(self.last):  # the tags have lines of their own
            text = text.removesuffix("\n").removeprefix("\n")
        known = properties_of(schema).get(found["key"], schema.get("additionalProperties"))
        stated = {"true": {"type": "string"}, "false": {}}.get(found.groupdict().get("string") or "", {})
        return typed(text, known if isinstance(known, Mapping) else stated, schema)


def _known(name: str, schemas: Schemas) -> str:
    """The name of an offered tool, which some models write after that of a module."""
    return name if name in schemas else name.rpartition(".")[2]


def offered_call(name: Any, arguments: Any, schemas: Schemas, id: str = "") -> Call | None:
    """The call of an offered tool, with arguments that JSON can express; None where it is none."""
    if not isinstance(name, str) or (known := _known(name, schemas)) not in schemas:
        return None
    if isinstance(arguments, str):  # JSON in JSON
        try:
            arguments = Reader(arguments or "{}")._value()
        except (ValueError, RecursionError):
            return None
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return None
    try:
        json_text(arguments)
    except ValueError:
        return None
    return Call(known, arguments, id)


class _ValueScan:
    """Counts brackets outside strings."""

    def __init__(self, body: Values, schemas: Schemas, stops: Sequence[str]):
        self._head = rf"{body.head}\s*(?=\{{)" if body.head else None
        self._stops = tuple(stops)
        delimiters = ['"', "'", *([body.delimiter] if body.delimiter else [])]
        literals = "|".join(re.escape(text) for text in (*stops, *delimiters))
        self._outside = re.compile(rf"{literals}|[\[\](){{}}]")
        self._inside = {text: re.compile(rf"\\.|{text}", re.DOTALL) for text in "\"'"}
        self._inside |= {text: re.compile(re.escape(text)) for text in delimiters[2:]}
        keys = "|".join((*KEYS, *map(re.escape, schemas)))
        self._lead = re.compile(rf"{FENCE}(?:(?=[{{\[])|{NAME}(?=\())")
        self._begins = re.compile(rf"\(|[\[\s]*(?:\{{\s*[\"']?(?:{keys})[\"']?\s*:|{NAME}\()")
        self._named = False
        self._start = self._at = -1
        self._depth, self._string = 0, ""

    def end(self, text: str, final: bool) -> int | None:
        if self._start < 0 and not self._find_start(text, final):
            return None
        known = len(text) if final else part_of_tag(text, (*self._stops, *self._inside))
        while found := (self._inside[self._string] if self._string else self._outside).search(text, self._at, known):
            token, self._at = found.group(), found.end()
            if self._string:
                self._string = "" if token == self._string else self._string
            elif token in self._stops:
                raise ValueError("a tag within brackets")
            elif token in self._inside:
                self._string = token
            else:
                self._depth += 1 if token in "[({" else -1
                if self._depth <= 0:
                    return self._at
        if final:
            raise ValueError("brackets without end")
        self._at = max(self._at, known - text.endswith("\\"))  # all before it is read
        whole = text[self._start : self._start + LIMIT]
        if len(whole) == LIMIT and not self._named and not self._begins.match(whole):
            raise ValueError("no call")
        return None

    def _find_start(self, text: str, final: bool) -> bool:
        first = text[:LIMIT]
        found = self._lead.match(first)
        if found is None and self._head is not None:
            found = re.match(self._head, first, re.DOTALL)
            self._named = found is not None
        if found is not None:
            self._start = self._at = found.end()
        elif final or len(first) == LIMIT:
            raise ValueError("no call")
        return found is not None


def part_of_tag(text: str, tags: Sequence[str]) -> int:
    """Where the end of a text begins that is a beginning of a tag; the length of the text where there is none."""
    starts = range(max(len(text) - max(map(len, tags), default=0) + 1, 0), len(text))
    return next(
        (i for i in starts if any(len(tag) > len(text) - i and tag.startswith(text[i:]) for tag in tags)), len(text)
    )


class _ParameterScan:
    """Finds the end of a call after the tag that closes its last parameter, or after its head."""

    def __init__(self, body: Parameters):
        self._head, self._last, self._end = re.compile(body.head), body.last, body.end
        self._start = self._at = -1  # of the parameters, and where the search goes on
        self._closed = True  # whether a parameter, or the head, ends there

    def end(self, text: str, final: bool) -> int | None:
        if self._start < 0:
            head = self._head.match(text[:LIMIT])
            if head is None and (final or len(text) >= LIMIT):
                raise ValueError("no call")
            if head is None:
                return None
            self._start = self._at = head.end()
        while self._closed or self._find_last(text):
            after = len(text) - len(text[self._at :].lstrip())
            if text.startswith(self._end, after):
                return after + len(self._end)
            if self._end.startswith(text[after : after + len(self._end)]):
                break  # the next text decides
            self._closed = False
        if not final:
            return None
        if (end := text.rfind(self._end, self._start)) < 0:
            raise ValueError("no end")
        return end + len(self._end)  # the tag before it is missing

    def _find_last(self, text: str) -> bool:
        """Go on after the next tag that closes a parameter; whether there is one."""
        found = text.find(self._last, self._at)
        self._closed = found >= 0
        self._at = found + len(self._last) if self._closed else max(self._at, len(text) - len(self._last) + 1)
        return self._closed
