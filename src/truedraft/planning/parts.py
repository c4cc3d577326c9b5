"""The parts of a memory plan: bytes, where they come from, and when they are held."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from truedraft.errors import Refused

Held = Literal["always", "start", "prompt", "draft", "pass", "later"]
Known = Literal["exact", "at most", "estimate", "unknown"]
PHASES: tuple[Held, ...] = ("start", "prompt", "draft", "pass")
UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True)
class Part:
    """A part of the memory that is needed.

    bytes: 0 where it is unknown. of: what they are computed from.
    held: the whole time, or only before the first token, while prompts are read, while drafts are made, or from a pass
        to the next; "later" is what may be kept of many calls, which one call does not need.
    known: whether they are those of the tensors that are allocated, the most that these may have, an estimate, or not
        known before the model runs.
    device: where they are held.
    """

    name: str
    bytes: int
    of: str
    held: Held = "always"
    known: Known = "exact"
    device: str = "cpu"


def by_device(parts: Iterable[Part]) -> dict[str, int]:
    """The most bytes that are held at once on each device."""
    found = list(parts)
    return {device: peak(part for part in found if part.device == device) for device in {p.device: 0 for p in found}}


def peak(parts: Iterable[Part]) -> int:
    """The most bytes that are held at once: what is always held, and the largest of the phases."""
    of: dict[Held, int] = {}
    for part in parts:
        of[part.held] = of.get(part.held, 0) + part.bytes
    return of.get("always", 0) + max(of.get(phase, 0) for phase in PHASES)


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / (1 << 30):.2f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"


def bytes_of(text: str, argument: str) -> int:
    """Bytes from a text such as 8GiB, 512M or 1000000; K, M, G and T are powers of 1024.

    Raises:
        Refused: another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise Refused(f"{argument} {text!r}: give a size, as in 8GiB or 512M")
    return int(float(match[1]) * (1 << UNITS[match[2]]))
