"""Arguments of tool calls as models write them, read as what JSON can express.

Models that are asked for JSON also write Python (`True`, single quotes, trailing commas, calls `f(a=1)`), keys without
quotes, or the plain text of a parameter, whose type the schema of the tool knows. Nothing is evaluated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

NAME = r"[^\W\d][\w.\-]*"  # of a function, or of an argument
CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
NUMBER = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
WORD, CALL, KEYWORD = re.compile(NAME), re.compile(rf"({NAME})\("), re.compile(rf"{NAME}\s*=")
SPACE = re.compile(r"\s*")
QUOTED = {quote: re.compile(rf"{quote}[^{quote}\\]*(?:\\.[^{quote}\\]*)*{quote}", re.DOTALL) for quote in "\"'"}
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}  # another character is itself
CLOSED = {"[": "]", "(": ")", "{": "}"}


class PythonCall(NamedTuple):
    """A call in Python's syntax: name, and arguments without and with names."""

    name: str
    unnamed: list[Any]
    named: dict[str, Any]


class Reader:
    """Reads values in the syntax of JSON and of Python's literals and calls.

    Args:
        text: all of it.
        at: where to begin.
        delimiter: a text that begins and ends strings, next to the usual quotes.
    """

    def __init__(self, text: str, at: int = 0, delimiter: str = ""):
        self.text, self.at, self.delimiter = text, at, delimiter

    def values(self) -> list[tuple[Any, str]]:
        """The value that is all of the text, or the values of a list: each with its text.

        Raises:
            ValueError: it is no value.
        """
        try:
            if self._next() == "[":
                self.at += 1
                found = self._items("]", self._with_text)
            else:
                found = [self._with_text()]
        except RecursionError as e:
            raise ValueError("nested too deeply") from e
        if self._next():
            raise ValueError(f"text after the value: {self.text[self.at : self.at + 20]!r}")
        return found

    def _next(self) -> str:
        """The next character that is no white space, to which this moves."""
        self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        return self.text[self.at : self.at + 1]

    def _with_text(self) -> tuple[Any, str]:
        self._next()
        start = self.at
        value = self._call() if CALL.match(self.text, start) else self._value()
        return value, self.text[start : self.at]

    def _items(self, closing: str, item: Any) -> list[Any]:
        """What is divided by commas, up to the closing bracket."""
        found = []
        while self._next() != closing:
            found.append(item())
            if self._next() == ",":
                self.at += 1
            elif self._next() != closing:
                raise ValueError(f"no comma or {closing} at {self.at}")
        self.at += 1
        return found

    def _value(self) -> Any:
        first = self._next()
        if first in QUOTED or self._at_delimiter():
            return self._string()
        if first == "{":
            self.at += 1
            return dict(self._items("}", lambda: self._pair(":")))
        if first in ("[", "("):
            self.at += 1
            return self._items(CLOSED[first], self._value)
        word = WORD.match(self.text, self.at)
        if word and word.group() in CONSTANTS:
            self.at = word.end()
            return CONSTANTS[word.group()]
        if number := NUMBER.match(self.text, self.at):
            self.at = number.end()
            return _number(number.group())
        raise ValueError(f"no value at {self.at}")

    def _call(self) -> PythonCall:
        called = CALL.match(self.text, self.at)
        if called is None:
            raise ValueError(f"no call at {self.at}")
        self.at, name = called.end(), called.group(1)
        if name == "print" and CALL.match(self.text, self.at):
            inner = self._call()
            if self._next() != ")":
                raise ValueError("print has more than one argument")
            self.at += 1
            return inner
        named: dict[str, Any] = {}
        unnamed = []
        for key, value in self._items(")", self._argument):
            if key is None and not named:
                unnamed.append(value)
            elif key is None or key in named:
                raise ValueError(f"{name} has an argument without a name, or two of one name")
            else:
                named[key] = value
        return PythonCall(name, unnamed, named)

    def _argument(self) -> tuple[str | None, Any]:
        self._next()
        return self._pair("=") if KEYWORD.match(self.text, self.at) else (None, self._value())

    def _pair(self, sign: str) -> tuple[str, Any]:
        quoted = self._next() in QUOTED or self._at_delimiter()
        if not quoted and not (word := WORD.match(self.text, self.at)):
            raise ValueError(f"no key at {self.at}")
        if quoted:
            key = self._string()
        else:
            self.at, key = word.end(), word.group()  # type: ignore[union-attr]
        if self._next() != sign:
            raise ValueError(f"no {sign} after {key!r}")
        self.at += 1
        return key, self._value()

    def _at_delimiter(self) -> bool:
        return bool(self.delimiter) and self.text.startswith(self.delimiter, self.at)

    def _string(self) -> str:
        """A string, or several next to each other, which Python joins: three quotes begin with an empty one."""
        found = ""
        while True:
            if self._at_delimiter():
                start = self.at + len(self.delimiter)
                end = self.text.find(self.delimiter, start)
                if end < 0:
                    raise ValueError("a string has no end")
                found, self.at = found + self.text[start:end], end + len(self.delimiter)
            elif (quote := self._next()) in QUOTED:
                whole = QUOTED[quote].match(self.text, self.at)
                if whole is None:
                    raise ValueError("a string has no end")
                found, self.at = found + _unescaped(whole.group()), whole.end()
            else:
                return found


def _number(text: str) -> int | float:
    plain = text.replace("_", "")
    if re.fullmatch(r"[-+]?\d+", plain):
        return int(plain)
    number = float(plain)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


def _unescaped(quoted: str) -> str:
    try:
        return str(json.loads(quoted, strict=False))
    except ValueError:
        return ESCAPE.sub(_character, quoted[1:-1])


def _character(escape: re.Match[str]) -> str:
    code = escape.group(1) or escape.group(2)
    return chr(int(code, 16)) if code else ESCAPED.get(escape.group(3), escape.group(3))


def json_text(value: Any) -> str:
    """A value as JSON text, which is valid Unicode also where a string has half of a surrogate pair.

    Raises:
        ValueError: JSON cannot express it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    except (TypeError, RecursionError) as e:
        raise ValueError("no value of JSON") from e
    return text


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that a text without quotes stands for, by the types that the schema of the parameter allows.

    A text that is of none of these types is a string, so that nothing is lost; without a schema it is what it reads as.

    Args:
        root: the schema in which references are looked up.
    """
    schema = resolved(schema, root)
    allowed = types_of(schema, root)
    if allowed is not None and "string" in allowed and allowed <= {"string", "null"}:
        plain = text.strip()
        if "null" in allowed and plain in ("null", "None"):
            return None
        return plain if plain in _list(schema.get("enum")) else text
    try:
        ((value, _),) = Reader(f"[{text}]").values()
    except ValueError:
        lowered = text.strip().lower()
        value = lowered == "true" if lowered in ("true", "false") else text
    if isinstance(value, PythonCall):
        return text
    if allowed is None or kind_of(value) in allowed or (kind_of(value) == "integer" and "number" in allowed):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in allowed:
        return int(value)
    if isinstance(value, str) and len(value) < len(text.strip()):  # in quotes
        return typed(value, schema, root)
    return text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> set[str] | None:
    """The JSON types that a schema allows; None where it does not say.

    Args:
        depth: alternatives within alternatives that are looked into.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return None
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return {kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)}
    if values := _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else []):
        return {kind_of(value) for value in values}
    if several := _list(schema.get("anyOf")) or _list(schema.get("oneOf")):
        found = [types_of(one, root, depth - 1) for one in several]
        return None if None in found else set().union(*(kinds or () for kinds in found))
    parts = [types_of(one, root, depth - 1) for one in _list(schema.get("allOf"))]
    return next((kinds for kinds in parts if kinds is not None), None)


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties that a schema names, none where it has no table of them."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def kind_of(value: Any) -> str:
    """The name of the JSON type of a value."""
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema with its reference into the root followed."""
    for _ in range(8):  # a reference may lead to itself
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for step in reference[2:].split("/"):
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return schema
