"""Local attention that a module applies by index in the cache, besides its mask: for nodes of a tree, by position."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.runtime.overrides import Override, Rule
from truedraft.runtime.padded import Padded


def local(model: PreTrainedModel) -> list[Rule]:
    """Overrides of attention over queries, keys and values (`_attn`) that masks by indices (`bias`), as in GPT-Neo."""
    return [
        partial(_by_position, module)
        for module in model.modules()
        if hasattr(type(module), "_attn") and getattr(module, "attention_type", None) in ("global", "local")
    ]


def _by_position(module: Any, nodes: Padded, extent: int) -> Override:
    """The module's own attention without its mask by indices; a local one is given a mask by positions."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Any:
        everything = torch.ones((), dtype=torch.bool, device=mask.device).expand(1, 1, extent, extent)
        own = SimpleNamespace(bias=everything, attn_dropout=module.attn_dropout)
        if module.attention_type == "local":
            far = ~nodes.near(extent, module.config.window_size)
            mask = mask.masked_fill(far[:, None], torch.finfo(mask.dtype).min)
        return type(module)._attn(own, query, key, value, mask)

    return module, "_attn", attend
