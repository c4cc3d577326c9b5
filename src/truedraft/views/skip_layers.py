"""Skips decoder layers, or the attention or the feed-forward of some: the hidden states pass what is skipped unchanged.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", 2023
(arXiv 2309.08168). Without a list of layers, as many as `share` says are skipped evenly, and never the first and the
last: Liu et al., "Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy", 2024
(arXiv 2404.06954), whose models are tuned for it; one that is not loses much, and which layers it can spare depends on
the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.views._base import Reduction, View
from truedraft.views._layers import FORM, check_layers, evenly, listed


@dataclass(frozen=True)
class SkipLayers(View):
    """A decoder without some of its layers. See `View`."""

    card = Card(
        paper="arXiv 2309.08168 (2023), 2404.06954 (2024)",
        idea="The model drafts for itself with some of its layers skipped.",
        family="self-drafting",
        presets={"unified-layer-skipping": {"share": 0.5}},
        published="Draft & Verify: up to 1.73x, with searched sets; unified skipping: tuned models, lossy.",
        lacks={
            "unified-layer-skipping": "layers are skipped evenly, as published; the model is not tuned for it, without "
            "which it loses much",
        },
    )
    layers: str = knob("", form=FORM, reader=listed)  # skipped; a, f: halves
    share: float = knob(0.4, 0, 1)  # of the layers, spread evenly, where none are listed; published about 0.5

    def reduction(self, layers: int) -> Reduction:
        if not self.layers:
            even = evenly(layers, self.share)
            return Reduction(even, even)
        found = listed(self.layers)
        check_layers(found, layers)
        return found
