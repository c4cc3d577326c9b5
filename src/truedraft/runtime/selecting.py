"""Which models can read a part of their KV cache, in which entries are not at the places of their positions."""

from __future__ import annotations

from dataclasses import replace

from truedraft.errors import Refused
from truedraft.views._base import Reduction


def fitted(name: str, reduction: Reduction, by_place: bool, window: int | None) -> Reduction:
    """A reduction with as many recent positions at most as all layers attend to, because no window is applied to chosen
    entries.

    Args:
        name: of the model, for messages.
        by_place: whether attention depends on the places of keys, other than by a window.
        window: the fewest recent positions that layers attend to; None where all attend to everything.

    Raises:
        Refused: entries are chosen, and attention depends on their places.
    """
    entries = reduction.entries
    if entries is None:
        return reduction
    if by_place:
        raise Refused(f"{name} cannot read a part of its KV cache: its attention depends on the places of keys")
    recent = entries.recent if window is None else min(entries.recent, window)
    return replace(reduction, entries=replace(entries, recent=recent))
