"""The weights that the compiled passes of heads read: those of the head, or copies of a byte each."""

from __future__ import annotations

from truedraft.errors import Refused
from truedraft.runtime.panels import Int8Copies

AUTO, INT8, NONE = KINDS = ("auto", "int8", "none")
FORM = f"{AUTO}, {INT8} or {NONE}"


def copies_of(kind: str) -> Int8Copies | None:
    """What makes the copies that compiled passes read, by the knob `quantize`; None for the weights themselves.

    With "auto" and "int8", compiled passes on the CPU read copies in int8, with a scale per row: drafts change a
    little, text does not. "int8" is refused where no pass of a head is compiled.

    Raises:
        ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError
    return None if kind == NONE else Int8Copies()


def check_copies(name: str, kind: str, copies: Int8Copies | None) -> None:
    """Raises:
    Refused: copies are required, and none were made.
    """
    if kind == INT8 and not copies:
        raise Refused(f"{name}:quantize=int8: no pass of its head is compiled here; leave `quantize` out")
