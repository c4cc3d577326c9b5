"""Skips decoder layers, or the attention or the feed-forward of some: the hidden states pass what is skipped unchanged.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", 2023
(arXiv 2309.08168). Without a list of layers, as many as `share` says are skipped evenly, and never the first and the
last: Liu et al., "Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy", 2024
(arXiv 2404.06954), whose models are tuned for it; one that is not loses much, and which layers it can spare depends on
the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.errors import Refused
from truedraft.views._base import Reduction, View

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


def evenly(layers: int, share: float) -> frozenset[int]:
    """`share` of the layers, evenly spaced, without the first and the last."""
    count = min(round(share * layers), layers - 2)
    return frozenset(1 + (2 * i + 1) * (layers - 2) // (2 * count) for i in range(count))


def check_layers(found: Reduction, layers: int) -> None:
    """Raises Refused where it names layers that a decoder with `layers` of them does not have."""
    if beyond := sorted(layer for layer in found.attention | found.feed_forward if layer >= layers):
        raise Refused(f"layers {beyond} cannot be skipped: the decoder has layers 0 to {layers - 1}")


@dataclass(frozen=True)
class SkipLayers(View):
    """A decoder without some of its layers. See `View`."""

    card = Card(
        paper="arXiv 2309.08168 (2023), 2404.06954 (2024)",
        idea="The model drafts for itself with some of its layers skipped.",
        family="self-drafting",
        presets={"unified-layer-skipping": {"share": 0.5}},
        published="Draft & Verify: up to 1.73x, with searched sets; unified skipping: tuned models, lossy.",
    )
    layers: str = knob("", form="layers and their halves, as in '4;6a;8-11f'", reader=listed)  # skipped; a, f: halves
    share: float = knob(0.4, 0, 1)  # of the layers, spread evenly, where none are listed; published about 0.5

    def reduction(self, layers: int) -> Reduction:
        if not self.layers:
            even = evenly(layers, self.share)
            return Reduction(even, even)
        found = listed(self.layers)
        check_layers(found, layers)
        return found
