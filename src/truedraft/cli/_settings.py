"""Settings of a conversation: fields of GenerationConfig that options give and that `/set` changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from truedraft.cli._request import SAMPLING, read_settings
from truedraft.errors import Refused

INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "no_repeat_ngram_size")
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(INTEGERS, ((int,), "an integer")),
    "eos_token_id": ((int,), "a token id or a list of them"),
    "do_sample": ((bool,), "True or False"),
}  # field -> the types of its values, and a name for them; other fields are numbers
FIXED = ("num_return_sequences",)  # fields that a conversation does not vary
FIELDS: dict[str, Any] = {
    "max_new_tokens": 512, "min_new_tokens": None, "do_sample": False, "max_time": None,
    **dict.fromkeys(SAMPLING), "repetition_penalty": None, "no_repeat_ngram_size": None, "stop_strings": None,
    "eos_token_id": None, "num_return_sequences": 1,
}  # fmt: skip  # those that `read_settings` expects, with their defaults here


@dataclass(frozen=True)
class Settings:
    """Values by field.

    fields: those that the command line has options for elsewhere, all of `FIELDS`.
    more: others, as text.
    """

    fields: Mapping[str, Any]
    more: Mapping[str, str] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """The fields that are set.

        Raises:
            Refused: a value or combination is invalid.
        """
        return read_settings(self.fields, [f"{key}={value}" for key, value in self.more.items()])

    def changed(self, text: str) -> Settings:
        """The settings with one changed, by `KEY=VALUE`; the value None stands for the default.

        Raises:
            Refused: there is no such field, or a value or combination is invalid.
        """
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise Refused(f"{text}: write KEY=VALUE, or KEY=None for the default")
        if key in FIXED:
            raise Refused(f"{key}: a conversation has one answer to each message")
        if key in self.fields:
            new = Settings({**self.fields, key: _value(key, value)}, self.more)
        else:
            kept = {k: v for k, v in self.more.items() if k != key}
            new = Settings(self.fields, kept if key in self.more and value == "None" else {**kept, key: value})
        try:
            new.values()
        except Refused as e:
            raise Refused(as_fields(str(e))) from e
        return new


def _value(key: str, text: str) -> Any:
    """The value of a field that the command line has an option for.

    Raises:
        Refused: it is of another type.
    """
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if value is None:
        return FIELDS[key]
    if key == "stop_strings":
        return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
    each = list(value) if key == "eos_token_id" and isinstance(value, list | tuple) else [value]
    kind, words = KINDS.get(key, ((int, float), "a number"))
    if not all(type(v) in kind for v in each):
        raise Refused(f"{key}={text}: give {words}")
    return each if key == "eos_token_id" else value


def as_fields(message: str) -> str:
    """A message about options, about fields."""
    message = message.replace("--set ", "").replace("--sample", "do_sample=True")
    return re.sub("--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), message)
