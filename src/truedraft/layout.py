"""Text and tables for terminals of any width: names fold, figures stay whole, columns have explanations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

SEPARATORS = ("|+?>:;,/=", "-_.")  # of names, broken preferably after one of the first, else after one of the others
PLAIN = 60  # columns of text where the width is unknown


def fold(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters.

    They are broken at spaces. Only a word that is longer than a line is broken itself, after a separator of names
    where it has one; its pieces join to the word.
    """
    ends = [r"(?=\s|$)", *(f"(?<=[{re.escape(marks)}])" for marks in SEPARATORS), ""]
    line = "|".join(rf"\S.{{0,{max(width, 1) - 1}}}{end}" for end in ends)
    return [found.rstrip() for found in re.findall(line, text)] or [""]


def labelled(lines: Iterable[tuple[str, str]], width: int = PLAIN, label: int = 0) -> str:
    """Labels with their texts in one column, folded; those without a text are left out.

    label: columns of the labels, at least those of the longest.
    """
    filled = [(name, text) for name, text in lines if text]
    label = max([label, *(len(name) for name, _ in filled)])
    folded = ((name, fold(text, width - label - 2)) for name, text in filled)
    return "\n".join(
        f"{'' if i else name:{label}}  {line}".rstrip() for name, texts in folded for i, line in enumerate(texts)
    )


@dataclass(frozen=True)
class Column(Generic[T]):
    """A column of a table.

    head: its heading, with the unit.
    means: its explanation for a newcomer; empty where the heading is enough.
    cell: the text of an entry, empty where it has none.
    """

    head: str
    means: str
    cell: Callable[[T], str]


@dataclass(frozen=True)
class Table(Generic[T]):
    """Entries in groups, the first column naming them; a group without a name has no heading."""

    title: str
    columns: Sequence[Column[T]]
    groups: Mapping[str, Sequence[T]]

    @property
    def filled(self) -> list[Column[T]]:
        """The columns that have a text for some entry."""
        entries = [entry for group in self.groups.values() for entry in group]
        return [column for column in self.columns if any(column.cell(entry) for entry in entries)]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The headings of the filled columns, and what they mean."""
        return [(column.head, column.means) for column in self.filled if column.means]


def grouped(entries: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Entries by the name of their group, in the order in which they come."""
    groups: dict[str, list[T]] = {}
    for entry in entries:
        groups.setdefault(name(entry), []).append(entry)
    return groups
