"""ALiBi in passes by the model's own forward: biases by the positions of keys, which in a tree are not their indices.

Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", 2022
(arXiv 2108.12409). `transformers` adds to the score of a key its head's slope times the key's index; softmax does not
depend on what all keys of a row have in common. In a pass over trees the position of a node's key takes the place of
its index.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.runtime.overrides import overridden
from truedraft.runtime.padded import Padded

BUILDER = "build_alibi_tensor"  # (2D mask, heads, dtype) -> (rows * heads, 1, keys), as in BLOOM


def biased(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a model that build ALiBi's biases."""
    return [module for module in model.modules() if hasattr(type(module), BUILDER)]


def by_position(modules: list[nn.Module], nodes: Padded, extent: int) -> AbstractContextManager[None]:
    """Within the block, this thread's calls of the modules build biases for nodes over the first `extent` positions."""
    return overridden((module, BUILDER, _builder(module, nodes, extent)) for module in modules)


def _builder(module: Any, nodes: Padded, extent: int) -> Callable[..., Tensor]:
    def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        positions = nodes.placed(extent)
        indices = torch.ones(1, extent, dtype=torch.long, device=positions.device)
        by_index = type(module).build_alibi_tensor(module, indices, heads, dtype)  # (heads, 1, extent)
        own: Tensor = by_index[:, 0, positions]  # (heads, rows, extent)
        return own.transpose(0, 1).reshape(-1, 1, extent)

    return build
