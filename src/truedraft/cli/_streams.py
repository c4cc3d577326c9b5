"""Standard streams as a command needs them: characters that they cannot encode, and a reader that has gone."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOKALIKES = str.maketrans({
    "‘": "'", "’": "'", "‚": ",", "“": '"', "”": '"', "„": '"', "–": "-", "—": "--", "−": "-", "×": "x", "μ": "u",
    "•": "*", "─": "-", "━": "-", "│": "|", "⁄": "/",
})  # fmt: skip
READER_GONE = 128 + 13  # as a shell reports a command that SIGPIPE ended


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command; `READER_GONE` where nobody reads its output any more (`| head`)."""
    try:
        with _substituting():
            return command()
    except (BrokenPipeError, SystemExit) as end:  # typer and rich turn the one into the other
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        return READER_GONE
    finally:
        _settle()


@contextmanager
def _substituting() -> Iterator[None]:
    """What the standard streams cannot encode is written as `_substitute` has it."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    errors = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors=_substitute.__name__)
    try:
        yield
    finally:
        for stream, before in zip(streams, errors, strict=True):
            stream.reconfigure(errors=before)


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Characters that look alike in ASCII, and escapes such as `\\u65e5` for those that have none."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(map(_ascii, text)), error.end


def _ascii(character: str) -> str:
    found = unicodedata.normalize("NFKC", character).translate(LOOKALIKES)
    return found if found.isascii() else character.encode("ascii", "backslashreplace").decode()


codecs.register_error(_substitute.__name__, _substitute)


def _settle() -> None:
    """What cannot be written any more is dropped, so that Python does not complain about it when it exits."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
