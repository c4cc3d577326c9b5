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


def everyday(kind: str, name: str) -> list[str]:
    """The features that the everyday suite runs with a method: every sixth in turn, so that six methods in
    order have all of them together, and those in which the method is an exception. `make real` runs all."""
    cells, first = stated(kind, name), matrix.methods().index((kind, name))
    usual = max(set(cells.values()), key=[*cells.values()].count)
    return [f for i, f in enumerate(matrix.FEATURES) if (first + i) % 6 == 0 or cells[f] != usual]


@pytest.mark.parametrize(
    "every", [pytest.param(False, id="in-turn"), pytest.param(True, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("kind", "name"), matrix.methods())
def test_the_page_has_the_cells_of_a_run(kind: str, name: str, every: bool) -> None:
    page = stated(kind, name)
    assert set(page) == set(matrix.FEATURES) and all(page.values())
    features = matrix.FEATURES if every else everyday(kind, name)
    found = matrix.cells(kind, name, features, in_turn=True)
    shown = {feature: cell.replace("`", "") for feature, cell in found.items()}
    assert shown == {feature: page[feature] for feature in features}, "run python tools/matrix.py"
