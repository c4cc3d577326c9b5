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
        """As `CompiledNodes`; slots are adjacent. A shorter row is padded by its last node."""
        assert self.cache is not None
        first = min(nodes.slot)
        lines: list[list[int]] = [[] for _ in range(max(nodes.slot) - first + 1)]
        for i, slot in enumerate(nodes.slot):
            lines[slot - first].append(i)
        width, extent = max(map(len, lines)), max(max(nodes.place) + 1, *nodes.base)
        seen = torch.zeros(len(nodes), extent, dtype=torch.bool)
        for i, line in enumerate(seen):
            line[: nodes.base[i]] = True
            line[nodes.extra[nodes.extra_from[i] : nodes.extra_from[i + 1]]] = True
        at = torch.tensor([line + line[-1:] * (width - len(line)) for line in lines])
        ids, positions, places = (
            torch.tensor(of_nodes)[at].to(self._device) for of_nodes in (nodes.token, nodes.position, nodes.place)
        )
        self.cache.cursor.placed(places, extent, first)
        logits = self.model(
            ids, attention_mask=attention_mask(self.model, seen[at][:, None].to(self._device)), position_ids=positions,
            past_key_values=self.cache, use_cache=True,
        ).logits  # fmt: skip
        column = {node: row * width + i for row, line in enumerate(lines) for i, node in enumerate(line)}
        return logits.flatten(0, 1)[torch.tensor([column[node] for node in gather], device=self._device)].float()
