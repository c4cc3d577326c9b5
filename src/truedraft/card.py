"""The description of a method: its card, and the ranges of its knobs."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any, Literal

from truedraft.errors import Refused

Guarantee = Literal["tokens", "distribution", "none"]
SHOWN = 60  # characters of a value in a message


def method_name(part: object) -> str:
    """Name of a method, from the file of its class: `prompt-lookup` of `prompt_lookup.py`."""
    return part.__class__.__module__.rpartition(".")[2].replace("_", "-")


@dataclass(frozen=True)
class Card:
    """The description of a method in its file; listings, documentation and tests are derived from it.

    paper: the source, with year.
    idea: one sentence that a newcomer understands.
    family: group of methods (retrieval, draft model, heads, ...).
    needs: requirements beyond the target ("references", "training", "MTP layers").
    cannot: target family -> why it is not supported.
    presets: name -> knobs, for published variants.
    lacks: own name or a preset's -> which part of its paper is here, and what is not; reports say so.
    also: name of a paper or another project's -> what there is here for it, empty where that is this method itself.
    published: the paper's own figures; those measured here are in `benchmarks/results/methods.json`.
    """

    paper: str
    idea: str
    family: str
    needs: tuple[str, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)
    published: str = ""


NO_CARD = Card("none", "None was given.", "none")  # of a part of a caller's own


def lacking(part: Any) -> list[str]:
    """The sentence of a report on what a method, by the name by which it was asked for, lacks of its paper; none where
    it lacks nothing."""
    lacks, own = getattr(part, "card", NO_CARD).lacks, method_name(part)
    name = asked if (asked := vars(part).get("asked", own)) in lacks else own
    return [f"{name} holds a part of its paper: {lacks[name]}"] if name in lacks else []


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; without `low` itself where `open`. Written "1 to 64"."""

    kind: type[int] | type[float]
    low: float
    high: float
    open: bool = False

    def __str__(self) -> str:
        low, high = (f"{end:,}" if self.kind is int else f"{end:g}" for end in (self.low, self.high))
        return f"above {low}, up to {high}" if self.open else f"{low} to {high}"

    @property
    def expected(self) -> str:
        return f"{'a whole number' if self.kind is int else 'a number'}, {self}"

    def read(self, value: Any) -> int | float:
        """The value as a number of its kind.

        Raises:
            ValueError, OverflowError: it is no number of this kind, or outside the range.
        """
        required = numbers.Integral if self.kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, required):
            raise ValueError
        number: int | float = self.kind(value)  # type: ignore[call-overload]
        if not self.low <= number <= self.high or (self.open and number == self.low):
            raise ValueError
        return number


@dataclass(frozen=True)
class Switch:
    """True or False."""

    expected = "True or False"

    def __str__(self) -> str:
        return self.expected

    def read(self, value: Any) -> bool:
        """Raises ValueError where it is neither."""
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class Text:
    """Text of a given form.

    form: its description. reader: a function that raises ValueError for other text.
    """

    form: str
    reader: Callable[[str], object]

    @property
    def expected(self) -> str:
        return self.form

    def __str__(self) -> str:
        return self.form

    def read(self, value: Any) -> str:
        """The text; a whole number is the text of its digits.

        Raises:
            ValueError: it is no text of this form.
        """
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError
        self.reader(str(value))
        return str(value)


Values = Range | Switch | Text


class Knob:
    """A field of a dataclass that accepts only values of its range, however it is set; see `knob`."""

    def __init__(self, default: Any, values: Values):
        self.default, self.values = default, values

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return self.default if method is None else method.__dict__.get(self.name, self.default)

    def __set__(self, method: Any, value: Any) -> None:
        try:
            vars(method)[self.name] = self.values.read(value)
        except (ValueError, OverflowError) as error:
            name = getattr(type(method), "name", None)  # that of a learner
            if not isinstance(name, str):
                name = method_name(method)
            raise Refused(f"{name}:{self.name}={shown(value)}: give {self.values.expected}") from error


def knob(
    default: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    open: bool = False,
    form: str = "any text",
    reader: Callable[[str], object] = str,
) -> Any:
    """A field of a method's dataclass, with its valid values: `nodes: int = knob(24, 1, 64)  # of the tree`.

    Numbers have a range, and are integers where the default is one. Text may have a form.

    Args:
        default: a number, True or False, or text.
        low, high: of a number, the least and the largest.
        open: `low` itself is excluded.
        form, reader: of text, see `Text`.
    """
    if isinstance(default, bool):
        return Knob(default, Switch())
    if isinstance(default, str):
        return Knob(default, Text(form, reader))
    assert low is not None and high is not None, "a number needs its range"
    return Knob(default, Range(type(default), low, high, open))


def values_of(method: type, name: str) -> Values | None:
    """The valid values of a knob of a method; None where they are not declared."""
    found = getattr_static(method, name, None)
    return found.values if isinstance(found, Knob) else None


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # integers of too many digits, and foreign objects
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
