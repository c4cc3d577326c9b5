"""Declarations of methods, read from their source: importing them needs torch, and takes seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from truedraft.card import knob


@dataclass(frozen=True)
class Declared:
    """The declaration of a method in its file.

    knobs: a dataclass with the fields of the method's class and the ranges of numbers; forms of text are not read, and
        defaults that are no literals are None.
    presets, also: as on the card.
    """

    knobs: type
    presets: Mapping[str, Mapping[str, Any]]
    also: Mapping[str, str]


@cache
def declared(module: str) -> Declared:
    """The method of a module, by its name; the class in it that has a card.

    Raises:
        TypeError: no class of the module has a card, or several have.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    classes = [node for node in ast.parse(Path(spec.origin).read_text("utf-8")).body if isinstance(node, ast.ClassDef)]
    found = [(node, card) for node in classes if (card := _card(node)) is not None]
    if len(found) != 1:
        raise TypeError(f"{module} must define one class with a card, found {len(found)}")
    node, card = found[0]
    fields = [
        (line.target.id, Any, _default(line.value))
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not _of_class(line.annotation)
    ]
    given = {word.arg: word.value for word in card.keywords}
    presets, also = (ast.literal_eval(given[field]) if field in given else {} for field in ("presets", "also"))
    knobs = make_dataclass(node.name, fields)
    knobs.__module__ = module  # the name in messages
    return Declared(knobs, presets, also)


def _card(node: ast.ClassDef) -> ast.Call | None:
    for line in node.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "card" and isinstance(line.value, ast.Call):
            return line.value
    return None


def _of_class(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).startswith("ClassVar")


def _default(value: ast.expr | None) -> Any:
    if value is None:
        return field(default=MISSING)
    try:
        return _knob(value) if isinstance(value, ast.Call) else field(default=ast.literal_eval(value))
    except ValueError:  # computed; it is checked when the method is built
        return field(default=None)


def _knob(call: ast.Call) -> Any:
    """The dataclass field of a call of `card.knob`; raises ValueError for another call."""
    if ast.unparse(call.func) != knob.__name__:
        raise ValueError
    default, *ends = map(ast.literal_eval, call.args)
    if isinstance(default, str):
        return field(default=default)
    return knob(default, *ends, **{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
