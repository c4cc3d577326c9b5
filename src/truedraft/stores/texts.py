"""Texts of files and folders, read in pieces that fit in memory whatever the size of a file."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from truedraft.errors import Refused

PIECE = 1 << 18  # characters of a piece, about
BLOCK = 1 << 20  # bytes checked at a time
FIELDS = ("text", "content")  # of a line of .jsonl, where no field is named
DAMAGED = (OSError, EOFError, zlib.error)


class Texts:
    """The texts of files and of all files in folders that are not hidden; each is read once.

    A file is a document; of .jsonl, each line is one. Files whose names end in .gz are unpacked.

    Args:
        paths: files and folders.
        field: of a line of .jsonl, the field with its text; by default `text` or `content`.

    Attributes:
        skipped: how many files (and lines of .jsonl) were left out, by the reason.

    Raises:
        Refused: a path is neither a file nor a folder.
    """

    def __init__(self, paths: Sequence[Path], field: str | None = None):
        for path in paths:
            if not path.is_dir() and not path.is_file():
                raise Refused(f"{str(path)!r} is no file or folder")
        self.paths, self.field = paths, field
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Iterator[str]]:
        """Documents, each in pieces that end at line ends; one has to be read before the next."""
        for path in self.files():
            if (why := _unreadable(path)) is not None:
                self.skipped[why] += 1
            elif path.name.removesuffix(".gz").endswith(".jsonl"):
                yield from self._lines(path)
            else:
                yield _pieces(path)

    def files(self) -> Iterator[Path]:
        seen = set()
        for given in self.paths:
            for path in _below(given) if given.is_dir() else [given]:
                if (real := os.path.realpath(path)) not in seen:
                    seen.add(real)
                    yield path

    def _lines(self, path: Path) -> Iterator[Iterator[str]]:
        with _opened(path) as file:
            for line in file:
                text = self._text(line) if line.strip() else ""
                if text is None:
                    self.skipped["lines of .jsonl without text"] += 1
                elif text:
                    yield (text[at : at + PIECE] for at in range(0, len(text), PIECE))

    def _text(self, line: str) -> str | None:
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError):
            return None
        names = (self.field,) if self.field else FIELDS
        found = next((record[name] for name in names if name in record), None) if isinstance(record, dict) else None
        return found if isinstance(found, str) else None


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (path for name in sorted(files) if not name.startswith(".") and (path := Path(root, name)).is_file())


def _unreadable(path: Path) -> str | None:
    """Why a file cannot be read as text; None where it can."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with _opened(path, "rb") as file:
            while block := file.read(BLOCK):
                if b"\0" in block:
                    return "binary files"
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "files that are not UTF-8"
    except DAMAGED:
        return "files that cannot be read"
    return None


def _pieces(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        while piece := file.read(PIECE) + file.readline(PIECE):
            yield piece


def _opened(path: Path, mode: str = "rt") -> IO[Any]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return opener(path, mode, **({"encoding": "utf-8-sig", "newline": ""} if mode == "rt" else {}))
