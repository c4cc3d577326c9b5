"""Sparse-dLLM: while a block is filled it reads half of the other positions, those that it attends to the most.

The first two passes over a block compute everything. By the second one, each layer keeps the positions outside of the
block with the largest products of their keys and the mean query of the block, over all heads, each position with the
largest of its neighbours; the passes that follow compute the block alone, which reads itself and these.

Song et al., "Sparse-dLLM: Accelerating Diffusion LLMs with Dynamic Cache Eviction", arXiv 2508.02558 (2025), section 3,
with the details of its code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.canvas._base import CanvasRow
from truedraft.canvas.views._base import Attention, CanvasView, steps_within, whole
from truedraft.card import Card, knob

DELAY = 1  # passes over a block before positions are chosen


@dataclass
class SparseDllm(CanvasView):
    card = Card(
        paper="arXiv 2508.02558 (2025)",
        idea="While a block is filled, read of the rest only what it attends to the most.",
        family="eviction",
        cannot={"attention in blocks": "keys and values of complete blocks are kept exactly"},
        published="Up to 10 times on LLaDA 8B and Dream 7B, at equal scores.",
    )
    reads_attention = True
    kept: float = knob(0.5, 0, 1)  # share of the positions outside of the block (0.5)
    pool: int = knob(3, 1, 63)  # adjacent positions of which the largest product counts, odd (3)
    refresh: int = knob(0, 0, 1024)  # passes within a block until all is computed and chosen anew; 0: never

    def _whole(self, row: CanvasRow) -> bool:
        steps = steps_within(row)
        return steps <= DELAY or (self.refresh > 0 and steps % self.refresh == 0)

    def positions(self, row: CanvasRow) -> range:
        return whole(row) if self._whole(row) else row.block

    def attend(self, row: CanvasRow, attention: Attention) -> Tensor | None:
        chosen: dict[int, Tensor] = row.memory.setdefault(id(self), {})
        if self._whole(row):
            if steps_within(row) >= DELAY:
                chosen[attention.layer] = self._chosen(row.block, attention)
            return None
        seen = chosen[attention.layer].clone()
        seen[list(attention.positions)] = True
        return seen.expand(1, len(attention.positions), -1)

    def _chosen(self, block: range, attention: Attention) -> Tensor:
        """(n,) bool: what is kept in a layer."""
        mean = attention.queries[:, block.start : block.stop].mean(1)
        score = torch.einsum("hd,hnd->n", mean, attention.keys) / len(mean)
        outside = [i for i in range(len(score)) if i not in block]
        pooled = torch.nn.functional.max_pool1d(
            score[outside][None].float(), self.pool, stride=1, padding=self.pool // 2
        )[0]
        order = pooled[: len(outside)].argsort(descending=True, stable=True)  # neighbours have equal values
        best = order[: int(self.kept * len(outside))]
        seen = torch.zeros_like(score, dtype=torch.bool)
        seen[torch.tensor(outside, device=score.device)[best]] = True
        return seen
