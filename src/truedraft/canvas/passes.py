"""Passes over canvases, by compiled code or by the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.forward import attention_mask
from truedraft.runtime.nodes import Nodes


class CompiledNodes:
    """The compiled pass over nodes, each with its own places to attend to. A node's logits have the same bits whatever
    else is in the pass.

    Raises:
        NotCompilable: the compiled pass is not available, or cannot replace this model's forward; with the reason.
    """

    name = CompiledPass.name
    batch_invariant = True

    def __init__(self, model: PreTrainedModel, copied: Any = None):
        self._pass = CompiledPass(model, copied)

    def attach(self, cache: RowCache | None) -> None:
        self._pass.attach(cache)

    def __call__(self, nodes: Nodes, gather: Sequence[int]) -> Tensor:
        """(len(gather), V) fp32 logits at these nodes; keys and values of all are written at their places."""
        return self._pass(nodes, gather)[0]


class ForwardNodes:
    """The model's own forward over the same nodes, padded to the longest row, with a mask and positions."""

    name = "transformers forward"
    batch_invariant = False

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]

    def attach(self, cache: RowCache | None) -> None:
        self.cache = cache

    @torch.no_grad()
    def __call__(self, nodes: Nodes, gather: Sequence[int]) -> Tensor:
        """As `CompiledNodes`; the nodes of a slot lie behind what it has in the cache, and slots are adjacent."""
        assert self.cache is not None
        cursor, first = self.cache.cursor, min(nodes.slot)
        rows, at = max(nodes.slot) - first + 1, [0] * len(nodes)
        counts = [0] * rows
        for i, slot in enumerate(nodes.slot):
            at[i], counts[slot - first] = counts[slot - first], counts[slot - first] + 1
        cursor.begin(first, first + rows, max(counts), self._device)
        ids = torch.zeros(rows, cursor.width, dtype=torch.long)
        positions = torch.zeros_like(ids)
        seen = torch.zeros(rows, cursor.width, cursor.extent, dtype=torch.bool)
        seen[:, :, 0] = True  # of padding, whose softmax needs an entry
        for i, (slot, column) in enumerate(zip(nodes.slot, at, strict=True)):
            ids[slot - first, column], positions[slot - first, column] = nodes.token[i], nodes.position[i]
            line = seen[slot - first, column]
            line[0] = False
            line[: nodes.base[i]] = True
            line[nodes.extra[nodes.extra_from[i] : nodes.extra_from[i + 1]]] = True
        logits = self.model(
            ids.to(self._device), attention_mask=attention_mask(self.model, seen[:, None].to(self._device)),
            position_ids=positions.to(self._device), past_key_values=self.cache, use_cache=True,
        ).logits  # fmt: skip
        chosen = torch.tensor([(nodes.slot[i] - first) * cursor.width + at[i] for i in gather], device=self._device)
        return logits.flatten(0, 1)[chosen].float()
