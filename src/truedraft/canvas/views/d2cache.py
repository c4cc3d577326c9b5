"""d2Cache: the masked positions that may be fixed soon and the tokens that are attended to the most are computed anew.

Of the masked positions from the block on, up to the end of the block that holds the 32nd, those with the largest
confidence times the density of known positions around them, those of the block first; of all others those that the last
step has fixed, and the nucleus of attention rollout: how much of each position reaches the final states through the
attention of all layers. The first pass computes everything; there is no renewal.

Jiang et al., "d2Cache: Accelerating Diffusion-Based LLMs via Dual Adaptive Caching", arXiv 2509.23094 (2025), sections
3.2 and 3.3, with the details of its code. There rows of a batch compute equally many positions; here each its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from truedraft.canvas._base import CanvasRow, Policy
from truedraft.canvas.policies.lossy._editing import Editing
from truedraft.canvas.views._base import Attention, CanvasView, latest, masked, renewed, whole
from truedraft.card import Card, knob, method_name
from truedraft.errors import Refused


@dataclass
class Learnt:
    """What is known of a row.

    confidence: (n,) latest probability of the likeliest token at masked positions.
    flows: by layer of the latest pass, the positions computed and (q, n) the share of each position in their states.
    """

    confidence: Tensor
    flows: list[tuple[Sequence[int], Tensor]] = field(default_factory=list)

    def rollout(self) -> Tensor:
        """(n,) how much of each position is in the final states of all."""
        found = torch.ones_like(self.confidence)
        for positions, flow in reversed(self.flows):
            at = list(positions)
            through, found[at] = found[at], 0.0
            found += through @ flow
        return found


@dataclass
class D2cache(CanvasView):
    card = Card(
        paper="arXiv 2509.23094 (2025)",
        idea="Compute masked positions that may be fixed soon and what is attended to the most.",
        family="adaptive cache",
        cannot={"attention in blocks": "keys and values of complete blocks are kept exactly"},
        published="On LLaDA and Dream faster, and better in score, than decoding without a cache.",
    )
    reads_attention = True
    candidates: int = knob(32, 1, 1024)  # masked positions per pass (32)
    share: float = knob(0.1, 0, 1)  # of the rollout of other positions that is computed (0.1)
    spread: float = knob(10.0, 0, 1024, open=True)  # standard deviation, in positions, of the density (10)
    gap: int = knob(0, 0, 64)  # longest distance of computed positions whose gap is computed too (0; 4 in parallel)
    refresh: int = knob(0, 0, 1024)  # passes within a block until all is computed anew; 0: never

    def check(self, policy: Policy) -> None:
        if isinstance(policy, Editing):
            raise Refused(
                f"lossy/d2cache predicts a part of the block, and rule='lossy/{method_name(policy)}' goes over all of "
                "it again: choose view='lossy/dual-cache'"
            )

    def positions(self, row: CanvasRow) -> Sequence[int]:
        if self.refresh and renewed(row, self.refresh):
            return whole(row)
        chosen = {*self._candidates(row), *latest(row)}
        importance = self._learnt(row).rollout()
        importance[list(chosen)] = 0.0
        order = importance.argsort(descending=True, stable=True)
        count = int((importance[order].cumsum(0) <= self.share * importance.sum()).sum())
        found = sorted(chosen.union(order[: max(count, 1)].tolist()))
        gaps = (range(a, b) for a, b in pairwise(found) if b - a <= self.gap)
        return sorted({*found, *(i for between in gaps for i in between)})

    def _candidates(self, row: CanvasRow) -> list[int]:
        unknown = masked(row)
        last = unknown[min(self.candidates, len(unknown)) - 1]
        end = next(block.stop for block in row.blocks if last in block)
        near = [i for i in unknown if i < end]
        score = self._learnt(row).confidence[near] * self._density(row)[[i - row.prompt for i in near]]
        order = sorted(range(len(near)), key=lambda k: (near[k] not in row.block, -float(score[k])))
        return [near[k] for k in order[: self.candidates]]

    def _density(self, row: CanvasRow) -> Tensor:
        """(new,) the share of known positions around each behind the prompt, by distance; beyond the text as at its
        end."""
        known = torch.tensor(row.canvas.known[row.prompt :], dtype=torch.float)
        n = len(known)
        around = torch.cat([torch.ones(n), known, known[-1:].expand(n)])
        distance = torch.arange(n, 2 * n)[:, None] - torch.arange(3 * n)
        weights = torch.exp(-(distance**2) / (2 * self.spread**2))
        return weights @ around / weights.sum(1)

    def attend(self, row: CanvasRow, attention: Attention) -> None:
        learnt, at = self._learnt(row), torch.tensor(attention.positions)
        if not attention.layer:
            learnt.flows.clear()
        flow = attention.weights.mean(0).cpu()
        flow[torch.arange(len(at)), at] += 1  # the residual stream
        learnt.flows.append((attention.positions, flow / flow.sum(1, keepdim=True)))

    def scored(self, row: CanvasRow, positions: Sequence[int], logits: Tensor) -> None:
        self._learnt(row).confidence[list(positions)] = logits.softmax(-1).amax(-1).cpu()

    def _learnt(self, row: CanvasRow) -> Learnt:
        if id(self) not in row.memory:
            row.memory[id(self)] = Learnt(torch.zeros(len(row.canvas)))
        return row.memory[id(self)]
