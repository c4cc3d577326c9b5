"""The compiled pass of an encoder-decoder's decoder: the nodes see their path, and their row's source."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.pairs import PairCache
from truedraft.runtime.lean import LeanPass, Nodes, array
from truedraft.runtime.native import Pass
from truedraft.runtime.weights import Unsuited
from truedraft.targets.positions import Positions, by_distance
from truedraft.tree import Prompt, Scores, Taps


class LeanPairPass(LeanPass):
    """See `LeanPass`. Padding of sources is left out: a row's keys and values stand together at the front."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self._positions = Positions(model.get_decoder(), model.config.pad_token_id or 0)

    @torch.no_grad()
    def attach(self, cache: PairCache | None) -> None:  # type: ignore[override]
        super().attach(None if cache is None else cache.rows)
        if cache is None:
            return
        self._pairs, p, capacity = cache, self.program, cache.cursor.capacity
        if (table := self._positions.table(capacity, torch.device("cpu"))) is not None:
            positions, blank = table
            if blank is not None and blank.any():
                raise Unsuited("padding has a position of its own")
            p.place(positions.contiguous(), blank=-1 if blank is None else self._positions.pad)
        self._biases = [by_distance(module, capacity) for _, module in p.biased]
        for (op, _), biases in zip(p.biased, self._biases, strict=True):
            op.bias, op.out = biases.data_ptr(), capacity

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        cache, first = self._pairs, len(self._pairs.lengths)
        states, heard = (torch.stack([getattr(p, name) for p in prompts]) for name in ("states", "heard"))
        order = (heard == 0).sort(dim=1, stable=True).indices
        cache.begin(states, heard)
        cache.cursor.first, cache.cursor.last = first, first + len(prompts)
        together = states.gather(1, order[:, :, None].expand_as(states))
        for layer, (op, keys, values) in zip(cache.sources, self.program.crosses, strict=True):
            layer.update(_heads(keys(together), op.heads), _heads(values(together), op.heads))
            op.keys, op.values = layer.addresses
        self._variants = {}
        return super().prefill(prompts, taps)

    def _complete(self, given: Pass, nodes: Nodes) -> None:
        counts = self._pairs.counts
        given.sources, given.heard = self._pairs.states.shape[1], array([counts[slot] for slot in nodes.slot])
        given.longest = max(nodes.longest, given.sources)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(rows, length, heads * size) to (rows, heads, length, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
