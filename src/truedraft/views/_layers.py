"""Lists of layers and halves, and a view without them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from truedraft.errors import Refused
from truedraft.views._base import Reduction, View

FORM = "layers and their halves, as in '4;6a;8-11f'"
PART = re.compile(r"(\d+)(?:-(\d+))?([af]?)")
MOST = 4096  # layers that a list may name


def listed(text: str) -> Reduction:
    """What a list of layers and halves names: "4;6a;8-11" are layers 4 and 8 to 11, and the attention of layer 6.

    Raises:
        ValueError: another format.
    """
    halves: dict[str, set[int]] = {"a": set(), "f": set()}
    for part in filter(None, text.split(";")):
        found = PART.fullmatch(part.strip())
        if found is None or int(found[2] or found[1]) >= MOST:
            raise ValueError
        for half in found[3] or "af":
            halves[half].update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return Reduction(frozenset(halves["a"]), frozenset(halves["f"]))


def text_of(left_out: Reduction) -> str:
    """The list of what is left out; see `listed`."""
    whole = [str(layer) for layer in left_out.layers]
    halves = [f"{layer}{'a' if layer in left_out.attention else 'f'}" for layer in left_out.halves]
    return ";".join(sorted(whole + halves, key=lambda part: int(part.rstrip("af"))))


def evenly(layers: int, share: float) -> frozenset[int]:
    """`share` of the layers, evenly spaced, without the first and the last."""
    count = min(round(share * layers), layers - 2)
    return frozenset(1 + (2 * i + 1) * (layers - 2) // (2 * count) for i in range(count))


def check_layers(found: Reduction, layers: int) -> None:
    """Raises Refused where it names layers that a decoder with `layers` of them does not have."""
    if beyond := sorted(layer for layer in found.attention | found.feed_forward if layer >= layers):
        raise Refused(f"layers {beyond} cannot be skipped: the decoder has layers 0 to {layers - 1}")


@dataclass(frozen=True)
class Without(View):
    """A decoder without given layers and halves."""

    left_out: Reduction

    @property
    def name(self) -> str:
        return f"skip-layers:layers={text_of(self.left_out)}"

    def reduction(self, layers: int) -> Reduction:
        return self.left_out
