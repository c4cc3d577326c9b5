"""What a method says of itself: its card, and the knobs that it takes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import Any, Literal

from truedraft.errors import Refused

Guarantee = Literal["tokens", "distribution", "none"]
SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Card:
    """A method in the words of its file; listings, documentation and tests are derived from it.

    paper: the source, with year.
    idea: one sentence that a newcomer understands.
    family: the shelf it stands on (retrieval, draft model, heads, ...).
    needs: what must be given beyond the target ("references", "weights", "training").
    cannot: target family -> why it cannot be served.
    presets: name -> knobs, for published variants.
    published: the paper's own figures; those measured here are in `benchmarks/results/methods.json`.
    """

    paper: str
    idea: str
    family: str
    needs: tuple[str, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published: str = ""


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
    def asked(self) -> str:
        return f"{'a whole number' if self.kind is int else 'a number'}, {self}"

    def read(self, value: Any) -> int | float:
        """The value as a number of its kind.

        Raises:
            ValueError, OverflowError: it is none, or lies outside.
        """
        wanted = numbers.Integral if self.kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError
        number: int | float = self.kind(value)  # type: ignore[call-overload]
        if not self.low <= number <= self.high or (self.open and number == self.low):
            raise ValueError
        return number


@dataclass(frozen=True)
class Switch:
    """True or False."""

    asked = "True or False"

    def __str__(self) -> str:
        return self.asked

    def read(self, value: Any) -> bool:
        """Raises ValueError where it is neither."""
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class Text:
    """Text of a form.

    form: in words. reader: raises ValueError for other text.
    """

    form: str
    reader: Callable[[str], object]

    @property
    def asked(self) -> str:
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
    """A field of a dataclass that takes nothing but its values, whenever and however it is set; see `knob`."""

    def __init__(self, default: Any, values: Values):
        self.default, self.values = default, values

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, method: Any, owner: type | None = None) -> Any:
        return self.default if method is None else vars(method).get(self.name, self.default)

    def __set__(self, method: Any, value: Any) -> None:
        try:
            vars(method)[self.name] = self.values.read(value)
        except (ValueError, OverflowError) as error:
            name = type(method).__module__.rpartition(".")[2].replace("_", "-")
            raise Refused(f"{name}:{self.name}={shown(value)}: give {self.values.asked}") from error


def knob(
    default: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    open: bool = False,
    form: str = "any text",
    reader: Callable[[str], object] = str,
) -> Any:
    """A field of a method's dataclass, with the values that it takes: `nodes: int = knob(24, 1, 64)  # of the tree`.

    Numbers have a range; whole numbers are those whose default is one. Text may have a form.

    Args:
        default: a number, True or False, or text.
        low, high: of a number, the least and the largest.
        open: the least itself is none of them.
        form, reader: of text, see `Text`.
    """
    if isinstance(default, bool):
        return Knob(default, Switch())
    if isinstance(default, str):
        return Knob(default, Text(form, reader))
    assert low is not None and high is not None, "a number needs its range"
    return Knob(default, Range(type(default), low, high, open))


def values_of(method: type, name: str) -> Values | None:
    """What a knob of a method takes; None where that is not declared."""
    found = getattr_static(method, name, None)
    return found.values if isinstance(found, Knob) else None


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # whole numbers of too many digits, and objects of others
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
