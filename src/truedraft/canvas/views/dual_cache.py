"""Dual cache: keys and values before the block and behind it are kept while the block is filled.

They are computed by a pass over the whole canvas at the beginning of the block, whose predictions are used too; the
passes that follow compute the block alone.

Wu et al., "Fast-dLLM", arXiv 2505.22618 (2025), section 3.2; see `prefix-cache`.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.canvas._base import CanvasRow
from truedraft.canvas.views._base import CanvasView, renewed, whole
from truedraft.card import Card, knob


@dataclass
class DualCache(CanvasView):
    card = Card(
        paper="arXiv 2505.22618 (2025)",
        idea="Keep keys and values of all but the block while the block is filled.",
        family="block cache",
        cannot={"attention in blocks": "keys and values of complete blocks are kept exactly"},
        published="Up to 27.6 times LLaDA with its caches and confident positions in parallel.",
    )
    refresh: int = knob(0, 0, 1024)  # passes within a block until all is computed anew; 0: at its beginning alone

    def positions(self, row: CanvasRow) -> range:
        return whole(row) if renewed(row, self.refresh) else row.block
