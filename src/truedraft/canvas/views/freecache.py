"""FreeCache: the prompt and complete blocks are computed no more.

The first pass computes everything; those that follow compute the block that is being filled and all masks behind it.
Keys and values of a block are left as its last pass had them, in which the last position to be fixed was a mask.

Hu et al., "FlashDLM: Accelerating Diffusion Language Model Inference via Efficient KV Caching and Guided Diffusion",
arXiv 2505.21467 (2025), its cache as its code has it. Its other half, guidance by a causal model, is the policy
`guided`.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow
from truedraft.canvas.views._base import CanvasView, steps_within, whole
from truedraft.card import Card, knob


@dataclass
class Freecache(CanvasView):
    card = Card(
        paper="arXiv 2505.21467 (2025)",
        idea="Compute the prompt and complete blocks no more.",
        family="block cache",
        cannot={"attention in blocks": "keys and values of complete blocks are kept exactly"},
        published="12.1 times on average with guidance by an autoregressive model, on Dream 7B and LLaDA 8B.",
    )
    refresh: int = knob(0, 0, 1024)  # passes within a block until all is computed anew; 0: never

    def positions(self, row: CanvasRow) -> range:
        steps = steps_within(row)
        again = self.refresh and steps % self.refresh == 0
        return whole(row) if again else range(row.block.start, len(row.canvas))
