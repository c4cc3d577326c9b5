"""The matrix of methods and features is what docs/matrix.md says; no cell is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

import matrix

PAGE = Path(__file__).resolve().parents[1] / "docs" / "matrix.md"


def stated(kind: str, name: str) -> dict[str, str]:
    """What the page says of a method."""
    text = PAGE.read_text()
    section = text.split("## ")[1 if kind == "drafters" else 2]
    sentences = dict(line.split(". ", 1) for line in text.splitlines() if line[:1].isdigit())
    table = [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    column = table[0].index(f"`{name}`")
    cells = {row[0]: row[column] for row in table[2:]}
    return {feature: _whole(cell, sentences) for feature, cell in cells.items()}


def _whole(cell: str, sentences: dict[str, str]) -> str:
    """A cell with its sentence in the place of the number."""
    return f"refused: {sentences[cell.split('(')[1].rstrip(')')]}" if cell.startswith("refused") else cell


@pytest.mark.parametrize(("kind", "name"), matrix.methods())
def test_the_page_says_what_happens(kind: str, name: str) -> None:
    found = matrix.cells(kind, name, in_turn=True)
    assert found == stated(kind, name), "run python tools/matrix.py"
    assert set(found) == set(matrix.FEATURES) and all(found.values())
