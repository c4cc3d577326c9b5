"""Exceptions and warnings, and the reason for an error as text."""

from __future__ import annotations

import re


class Refused(ValueError):
    """A setting that cannot be honoured exactly; the message names the argument, its value and the remedy."""


class NoRoom(Refused):
    """There is not enough memory for the rows and positions requested."""


class Note(UserWarning):
    """Information for the user that changes no result; the command line prints it on stderr."""


def why(error: BaseException) -> str:
    """The reason for an error as text: without `[Errno 2]`; the name of its type where it has no message."""
    message = (isinstance(error, OSError) and error.strerror) or str(error)
    return re.sub(r"\[Errno -?\d+\] ", "", message) or type(error).__name__
