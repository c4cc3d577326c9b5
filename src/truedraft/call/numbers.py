"""Numbers among the settings of `generate`: of which types they are taken, and errors that name them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import dropwhile
from numbers import Real
from traceback import walk_tb
from typing import Any

from truedraft.errors import Refused

LENGTHS = ("max_new_tokens", "max_length")
WHOLE = (
    *LENGTHS, "min_new_tokens", "min_length", "top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "num_return_sequences", "forced_eos_token_id",
)  # fmt: skip
FRACTIONS = (
    "temperature", "repetition_penalty", "encoder_repetition_penalty", "max_time", "top_p", "min_p", "typical_p",
    "top_h", "epsilon_cutoff", "eta_cutoff",
)  # fmt: skip


def setting(name: str, kwargs: Mapping[str, Any], model: Any) -> Any:
    """A setting of a call of `generate`: the argument, or that of its generation config, or that of the model's."""
    if name in kwargs:
        return kwargs[name]
    configs = kwargs.get("generation_config"), getattr(model, "generation_config", None)
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def check_numbers(kwargs: Mapping[str, Any], model: Any) -> None:
    """Raises Refused for a length without an end, for which no memory can be reserved, and for numbers as text."""
    for name in (*WHOLE, *FRACTIONS):
        value = setting(name, kwargs, model)
        if isinstance(value, str):
            raise Refused(f"{name}={value!r} is a text: give a number")
        if name in LENGTHS and isinstance(value, Real) and not math.isfinite(value):
            raise Refused(f"{name}={value!r}: give a whole number of tokens")


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A number as an integer, also where it is a float such as 4.0.

    Raises:
        Refused: it is no whole number, or a smaller one than `least`.
    """
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not math.isfinite(number) or number != int(number) or (least is not None and number < least):
        raise Refused(f"{name}={value!r}: give a whole number{'' if least is None else f' of at least {least}'}")
    return int(number)


@contextmanager
def named(kwargs: Mapping[str, Any], model: Any) -> Iterator[None]:
    """Within the block, errors of `generate` about the type of a number become Refused: their own words name another
    argument, or none. Those of a decode loop that it has called are left as they are."""
    try:
        yield
    except Refused:
        raise
    except (TypeError, ValueError) as error:
        modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
        within = [*dropwhile(lambda name: not name.startswith("transformers"), modules)]
        others = not within or any(name.startswith("truedraft") for name in within)
        if others or (reason := _misfit(kwargs, model)) is None:
            raise
        raise Refused(reason) from error


def _misfit(kwargs: Mapping[str, Any], model: Any) -> str | None:
    """What is wrong with the first number of a type that `transformers` does not take."""
    for name in (*WHOLE, *FRACTIONS):
        value = setting(name, kwargs, model)
        kind: type = int if name in WHOLE else float
        if value is None or type(value) is kind or isinstance(value, list):
            continue
        if name in (*LENGTHS, *FRACTIONS) and isinstance(value, Real) and not float(value) > 0:
            continue  # it is refused for what it is, of whatever type
        given = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        fits = given and (kind is float or value == int(value))
        own = name not in kwargs and getattr(kwargs.get("generation_config"), name, None) is None
        needed = "a whole number (int)" if kind is int else "a number (float)"
        return (
            f"{'model.generation_config.' * own}{name}={value!r}: transformers takes {needed} here: give "
            f"{kind(value) if fits else 'one'}"
        )
    return None
