"""`truedraft methods`: lists every drafter, rule and control, from their cards."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from truedraft.cli._options import AsJson
from truedraft.cli._text import console, waiting
from truedraft.layout import labelled

WIDTH = 100  # most columns of running text


def methods(as_json: AsJson = False) -> None:
    """List every drafter, acceptance rule and control, with its idea, knobs and paper."""
    with waiting("reading the cards"):
        found = listing()
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        _print(found)


def listing() -> dict[str, list[dict[str, Any]]]:
    """Kind of method -> the fields of each card, in the order of the names."""
    from truedraft import registry

    return {
        kind: [_entry(name, registry.method(kind, name)) for name in registry.names(kind)] for kind in registry.KINDS
    }


def _entry(name: str, cls: Any) -> dict[str, Any]:
    from truedraft.card import values_of

    knobs = inspect.signature(cls).parameters
    entry = {
        "name": name,
        "idea": cls.card.idea,
        "family": cls.card.family,
        "paper": cls.card.paper,
        "needs": list(cls.card.needs),
        "knobs": {k.name: None if k.default is k.empty else k.default for k in knobs.values()},
        "takes": {k: str(values) for k in knobs if (values := values_of(cls, k)) is not None},
        "presets": {preset: dict(values) for preset, values in cls.card.presets.items()},
        "part": dict(cls.card.lacks),
        "also": dict(cls.card.also),
    }
    return entry | ({"guarantee": cls.guarantee} if hasattr(cls, "guarantee") else {})


def _print(found: dict[str, list[dict[str, Any]]]) -> None:
    from truedraft.registry import KINDS

    out = console()
    width = min(out.width, WIDTH)
    for kind, entries in found.items():
        named = KINDS[kind]
        out.print(f"{named.title} (--{named.argument} {named.spelling})", style="bold underline")
        out.print()
        for entry in entries:
            out.print(entry["name"], style="bold")
            out.print(labelled([(f"  {head}", text) for head, text in _described(entry)], width))
            out.print()


def _described(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines of a method in the listing: heading and text."""
    yield "idea", entry["idea"]
    yield "knobs", _knobs(entry["knobs"], entry["takes"])
    for preset, values in entry["presets"].items():
        yield "preset", f"{preset}: {_knobs(values)}"
    for name, lacks in entry["part"].items():
        yield "part", f"{name} holds a part of its paper: {lacks}"
    for name, answer in entry["also"].items():
        yield "also for", f"{name}: {answer}" if answer else name
    yield "guarantee", entry.get("guarantee", "")
    yield "needs", ", ".join(entry["needs"])
    yield "paper", entry["paper"]


def _knobs(values: dict[str, Any], ranges: Mapping[str, str] = MappingProxyType({})) -> str:
    """Knobs with their values and, in brackets, their ranges."""
    shown = (f"{knob}={value}" + (f" ({ranges[knob]})" if knob in ranges else "") for knob, value in values.items())
    return ", ".join(shown)
