"""Standard streams of a command: characters that they cannot encode, and a closed reader."""

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
READER_GONE = 128 + 13  # the exit code of a command ended by SIGPIPE


def guarded(command: Callable[[], int]) -> int:
    """Run a command; returns its exit code, `READER_GONE` where the reader of its output has closed it (`| head`)."""
    try:
        with _substituting():
            return command()
    except (BrokenPipeError, SystemExit) as end:  # typer and rich convert the one to the other
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise
        return READER_GONE
    finally:
        _settle()


@contextmanager
def _substituting() -> Iterator[None]:
    """Within the block, `_substitute` replaces characters that the standard streams cannot encode."""
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
    """ASCII characters that look alike, or escapes such as `\\u65e5` where there is none."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(map(_ascii, text)), error.end


def _ascii(character: str) -> str:
    found = unicodedata.normalize("NFKC", character).translate(LOOKALIKES)
    return found if found.isascii() else character.encode("ascii", "backslashreplace").decode()


codecs.register_error(_substitute.__name__, _substitute)


def _settle() -> None:
    """Drop output that can no longer be written, so that Python reports no error at exit."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
