"""Skips some decoder layers: the hidden states pass through a skipped layer unchanged.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding", 2023
(arXiv 2309.08168), which skips attention and feed-forward halves of layers; here whole layers are skipped. Skipping all
layers from one on is an early exit through the target's own norm and head, as in LayerSkip (arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from truedraft.errors import Refused
from truedraft.tree import Taps
from truedraft.views._base import View


@dataclass(frozen=True)
class SkipLayers(View):
    """A decoder without some of its layers. See `View`."""

    layers: Collection[int]  # the skipped layers, from 0 on, in any order
    taps: Taps = View.taps  # what its passes yield besides logits

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", frozenset(self.layers))

    def skipped(self, layers: int) -> frozenset[int]:
        if beyond := sorted(layer for layer in self.layers if not 0 <= layer < layers):
            raise Refused(f"layers {beyond} cannot be skipped: the decoder has layers 0 to {layers - 1}")
        return frozenset(self.layers)
