"""Attention whose queries are scaled by their indices in the cache: for nodes of a tree, by their positions.

Llama 4's layers without positions do so (after Nakanishi, 2025, "Scalable-Softmax Is Superior for Attention",
arXiv 2501.19399).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.runtime.overrides import Override, Rule
from truedraft.runtime.padded import Padded


def tempered(model: PreTrainedModel) -> list[Rule]:
    """Overrides of attention with such scales."""
    return [
        partial(_by_position, module)
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    ]


def _by_position(module: Any, nodes: Padded, extent: int) -> Override:
    return module, "forward", partial(type(module).forward, _Scaled(module, nodes.positions))


class _Scaled:
    """An attention module whose queries are projected and scaled, by positions (rows, width), and not again."""

    attn_temperature_tuning = False

    def __init__(self, module: Any, positions: Tensor):
        self._module, self._positions = module, positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def q_proj(self, states: Tensor) -> Tensor:
        steps = torch.floor((self._positions.float() + 1.0) / self.floor_scale)
        queries: Tensor = self._module.q_proj(states)
        return (queries * (torch.log1p(steps) * self.attn_scale + 1.0)[:, :, None]).to(queries.dtype)
