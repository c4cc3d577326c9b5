"""SparseD: after the first steps, each head reads the blocks of positions that it attended to the most.

Until a fifth of the text is known attention is whole. One pass then chooses for each head and each block of queries, by
mean attention, a share of the blocks of keys of the prompt and a share of those behind it; all later passes read these
alone. Every pass computes all positions. It pays at tens of thousands of tokens, with attention by blocks; torch's,
which is given a mask, is no faster for it.

Wang et al., "SparseD: Sparse Attention for Diffusion Language Models", arXiv 2509.24014 (2025), section 4. In its code
for LLaDA queries of the prompt read no keys of the prompt; here, as in the paper, they do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.canvas._base import CanvasRow
from truedraft.canvas.views._base import Attention, CanvasView, masked, whole
from truedraft.card import Card, knob


@dataclass
class Sparsed(CanvasView):
    card = Card(
        paper="arXiv 2509.24014 (2025)",
        idea="After the first steps, let each head read the blocks that it attended to the most.",
        family="sparse attention",
        cannot={"attention in blocks": "it chooses among all positions"},
        presets={"sparsed-short": {"size": 32, "share": 0.5}},
        published="Up to 1.50 times FlashAttention at 64K tokens and 1,024 steps, at equal scores.",
    )
    reads_attention = True
    skip: float = knob(0.2, 0, 1)  # share of the new positions known before attention is sparse (0.2)
    share: float = knob(0.3, 0, 1)  # of the blocks of keys, rounded up (0.3; 0.5 for short texts)
    size: int = knob(128, 1, 4096)  # of a block of queries or keys (128; 32 for short texts)

    def positions(self, row: CanvasRow) -> range:
        return whole(row)

    def attend(self, row: CanvasRow, attention: Attention) -> Tensor | None:
        chosen: dict[int, Tensor] = row.memory.setdefault(id(self), {})
        if attention.layer in chosen:
            return chosen[attention.layer]
        new = len(row.canvas) - row.prompt
        if 1 - len(masked(row)) / new >= self.skip:
            self._remember(chosen, row, attention)
        return None

    def _remember(self, chosen: dict[int, Tensor], row: CanvasRow, attention: Attention) -> None:
        n, size = len(row.canvas), self.size
        blocks, first = -(-n // size), min(-(-row.prompt // size), -(-n // size) - 1)
        pad = blocks * size - n
        padded = torch.nn.functional.pad(attention.weights, (0, pad, 0, pad))
        mean = padded.unflatten(2, (blocks, size)).unflatten(1, (blocks, size)).mean((2, 4))  # (heads, blocks, blocks)
        seen = torch.zeros_like(mean, dtype=torch.bool)
        for start, part in ((0, mean[..., :first]), (first, mean[..., first:])):
            if count := part.shape[-1]:
                best = part.topk(min(int(count * self.share) + 1, count)).indices
                seen.scatter_(2, best + start, True)
        chosen[attention.layer] = seen.repeat_interleave(size, 1).repeat_interleave(size, 2)[:, :n, :n]
