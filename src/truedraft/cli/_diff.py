"""Differences within a line, by words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

WORD = re.compile(r"\s+|[\w'’-]+|.")
REMOVED, INSERTED = "red strike", "green"

Parts = Sequence[tuple[str, str]]


def changes(parts: Parts) -> Iterator[tuple[str, str]]:
    """Split a line into (removed, inserted) pairs by words; the two are equal where nothing changed.

    parts: (before, after) of each piece of the line.
    """
    for before, after in parts:
        if before == after:
            yield before, after
            continue
        old, new = WORD.findall(before), WORD.findall(after)
        removed = inserted = ""
        for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            cut, added = "".join(old[a:b]), "".join(new[c:d])
            between = kind == "equal" and cut.isspace() and b < len(old) and d < len(new)
            if kind != "equal" or (between and (removed or inserted)):
                removed, inserted = removed + cut, inserted + added
                continue
            yield from _changed(removed, inserted)
            yield cut, added
            removed = inserted = ""
        yield from _changed(removed, inserted)


def _changed(removed: str, inserted: str) -> Iterator[tuple[str, str]]:
    """A change; white space at the end of both sides is yielded separately, as unchanged."""
    kept = len(removed) - len(removed.rstrip()) if removed.strip() and inserted.strip() else 0
    tail = removed[len(removed) - kept :]
    if tail and inserted.endswith(tail):
        yield removed[:-kept], inserted[:-kept]
        yield tail, tail
    elif removed or inserted:
        yield removed, inserted


def coloured(parts: Parts) -> Text:
    """For a terminal: what was removed in red and struck out, what was inserted in green."""
    from rich.text import Text

    text = Text()
    for removed, inserted in changes(parts):
        if removed == inserted:
            text.append(removed)
        else:
            text.append(removed, REMOVED).append(inserted, INSERTED)
    return text


def marked(parts: Parts) -> str:
    """For a file: `[-removed-]{+inserted+}`, as wdiff and `git diff --word-diff` write it."""
    return "".join(
        removed if removed == inserted else (removed and f"[-{removed}-]") + (inserted and f"{{+{inserted}+}}")
        for removed, inserted in changes(parts)
    )
