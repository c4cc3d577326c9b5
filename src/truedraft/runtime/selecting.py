"""Which models can read a part of their KV cache, in which entries are not at the places of their positions."""

from __future__ import annotations

from truedraft.errors import Refused
from truedraft.views._base import Selection


def check_entries(name: str, entries: Selection, by_place: bool, window: int | None) -> None:
    """Check that attention over chosen entries does not depend on their places.

    Windows are ignored: all entries are read.

    Args:
        name: of the model, for messages.
        by_place: whether attention depends on the places of keys, other than by a window.
        window: most recent positions that some layers attend to; None where there are no such layers.

    Raises:
        Refused: it depends on them, or some layers would read more than their window, except for the first positions.
    """
    if by_place:
        raise Refused(f"{name} cannot read a part of its KV cache: its attention depends on the places of keys")
    if window is not None and window < entries.recent:
        raise Refused(
            f"{name} cannot read {entries} of its KV cache: some of its layers attend to {window} positions, choose no "
            "more recent ones"
        )
