"""Ends after the first layers: their hidden state goes through the target's own final norm and head.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024 (arXiv 2404.16710).
It pays for checkpoints that were trained for it, with layer dropout and a loss at every exit; others predict little
from their first layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.errors import Refused
from truedraft.views._base import Reduction, View


@dataclass(frozen=True)
class EarlyExit(View):
    """The first layers of a decoder. See `View`."""

    card = Card(
        paper="arXiv 2404.16710 (2024)",
        idea="The model drafts for itself with its first layers and its own head.",
        family="self-drafting",
        published="LayerSkip checkpoints: 1.3x to 2.2x, exits at 6 to 9 of 24 to 40 layers.",
        also={
            "layerskip": "its checkpoints draft for themselves by draft='early-exit'; its training is not here",
        },
    )
    exit: int = knob(0, 0, 4095)  # layers that run; 0 for a third of them; published 4 to 9

    def reduction(self, layers: int) -> Reduction:
        if self.exit >= layers:
            raise Refused(f"early-exit:exit={self.exit}: the decoder has {layers} layers, leave out at least one")
        rest = frozenset(range(self.exit or max(layers // 3, 1), layers))
        return Reduction(rest, rest)
