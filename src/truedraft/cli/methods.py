"""`truedraft methods`: every drafter, rule and control, from their cards."""

from __future__ import annotations

import inspect
import json
from typing import Any

from truedraft.cli._options import AsJson

TITLES = {
    "drafters": "Drafters (--draft)",
    "accept": "Acceptance rules (--rule)",
    "accept.lossy": "Lossy rules: text that the model alone would not have said (--rule lossy/NAME)",
    "control": "Controls (--control)",
}


def methods(as_json: AsJson = False) -> None:
    """List every drafter, acceptance rule and control, with its idea, knobs and paper."""
    from truedraft.cli._text import waiting

    with waiting("reading the cards"):
        found = listing()
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        _print(found)


def listing() -> dict[str, list[dict[str, Any]]]:
    """Kind of method -> what each card says, in the order of the names."""
    from truedraft import registry

    return {kind: [_entry(name, registry.method(kind, name)) for name in registry.names(kind)] for kind in TITLES}


def _entry(name: str, cls: Any) -> dict[str, Any]:
    knobs = inspect.signature(cls).parameters.values()
    entry = {
        "name": name,
        "idea": cls.card.idea,
        "family": cls.card.family,
        "paper": cls.card.paper,
        "needs": list(cls.card.needs),
        "knobs": {k.name: None if k.default is k.empty else k.default for k in knobs},
        "presets": {preset: dict(values) for preset, values in cls.card.presets.items()},
    }
    return entry | ({"guarantee": cls.guarantee} if hasattr(cls, "guarantee") else {})


def _print(found: dict[str, list[dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 140
    for kind, entries in found.items():
        table = Table(title=TITLES[kind], title_justify="left", show_lines=True)
        table.add_column("name and presets", no_wrap=True)
        for heading in ("idea", "knobs", *(["guarantee"] if kind.startswith("accept") else []), "paper"):
            table.add_column(heading)
        for e in entries:
            named = [e["name"], *(f"  {preset}: {_knobs(values)}" for preset, values in e["presets"].items())]
            guarantee = [e["guarantee"]] if "guarantee" in e else []
            table.add_row("\n".join(named), e["idea"], _knobs(e["knobs"]), *guarantee, e["paper"])
        console.print(table)


def _knobs(values: dict[str, Any]) -> str:
    return ", ".join(f"{knob}={value}" for knob, value in values.items())
