"""Every cell of docs/matrix.md is what a run of its method and feature gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import matrix

PAGE = Path(__file__).resolve().parents[1] / "docs" / "matrix.md"


def stated(kind: str, name: str) -> dict[str, str]:
    """The cells of a method on the page: feature -> cell."""
    introduction, *sections = PAGE.read_text().split("\n## ")
    listed, everywhere = (_items(part) for part in introduction.split("The features:")[1].split("Refused with"))
    (line,) = [line for line in sections[kind == "accept"].splitlines() if line.startswith(f"| `{name}` |")]
    _, usual, others = (cell.strip() for cell in line.strip("|").split("|"))
    cells = dict.fromkeys(listed, usual)
    for exception in [*filter(None, others.split("<br>")), *everywhere]:
        feature, cell = exception.split(": ", 1)
        cells[feature] = cell.replace("`", "")
    return cells


def _items(text: str) -> list[str]:
    return [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]


@pytest.mark.parametrize(("kind", "name"), matrix.methods())
def test_the_page_has_the_cells_of_a_run(kind: str, name: str) -> None:
    found = matrix.cells(kind, name, in_turn=True)
    shown = {feature: cell.replace("`", "") for feature, cell in found.items()}
    assert shown == stated(kind, name), "run python tools/matrix.py"
    assert set(found) == set(matrix.FEATURES) and all(found.values())
