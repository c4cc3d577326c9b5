"""Figures of methods in `results/methods.json`, from which `tools/docs.py` prints them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truedraft.files import write_whole

FILE = Path(__file__).parent / "results" / "methods.json"


def figure(what: str, value: float, unit: str, setting: str, machine: str, command: str) -> dict[str, Any]:
    return dict(what=what, value=value, unit=unit, setting=setting, machine=machine, command=command)


def note(kind: str, name: str, figures: Sequence[dict[str, Any]], file: Path = FILE) -> None:
    """Write the figures of a method; they replace those that the same commands made before."""
    found = json.loads(file.read_text("utf-8"))
    made = {one["command"] for one in figures}
    before = [one for one in found.setdefault(kind, {}).get(name, []) if one["command"] not in made]
    found[kind][name] = [*before, *figures]
    write_whole(file, laid_out(found))


def laid_out(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """The text of the file: a line for each figure."""
    kinds = []
    for kind, methods in found.items():
        of_kind = []
        for name, figures in sorted(methods.items()):
            lines = ",\n".join(f"   {json.dumps(one, ensure_ascii=False)}" for one in figures)
            of_kind.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        kinds.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(of_kind) + "\n }")
    return "{\n" + ",\n".join(kinds) + "\n}\n"
