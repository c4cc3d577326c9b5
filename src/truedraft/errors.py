"""Exceptions and warnings, and the reason for an error as text."""

from __future__ import annotations

import re
from contextlib import suppress
from types import FrameType


class Refused(ValueError):
    """A setting that cannot be honoured exactly; the message names the argument, its value and the remedy."""


class NoRoom(Refused):
    """There is not enough memory for the rows and positions requested."""


class Broken(Refused):
    """The model or what it runs on is at fault, and no setting of the call."""


class Note(UserWarning):
    """Information for the user that changes no result; the command line prints it on stderr."""


def why(error: BaseException) -> str:
    """The reason for an error, in words: without `[Errno 2]`, and with the name of its type where it has no words."""
    words = (isinstance(error, OSError) and error.strerror) or str(error)
    return re.sub(r"\[Errno -?\d+\] ", "", words) or type(error).__name__


def let_go(error: BaseException) -> None:
    """Free what the frames of a raised error hold, but for those that still run; its traceback reads as before."""
    trace = error.__traceback__
    while trace is not None:
        frame: FrameType | None = trace.tb_frame
        while frame is not None:
            with suppress(RuntimeError):  # it runs still
                frame.clear()
            frame = frame.f_back
        trace = trace.tb_next
