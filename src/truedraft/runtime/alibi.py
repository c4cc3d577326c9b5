"""ALiBi in passes by the model's own forward: biases by the positions of keys, which in a tree are not their indices.

Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", 2022
(arXiv 2108.12409). `transformers` adds to the score of a key its head's slope times the key's index; softmax does not
depend on what all keys of a row have in common. In a pass over trees the position of a node's key takes the place of
its index.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.runtime.overrides import Override, Owner, Rule, own
from truedraft.runtime.padded import Padded

BUILDER = "build_alibi_tensor"  # (2D mask, heads, dtype) -> (rows * heads, 1, keys): BLOOM's method, Falcon's function
WITHOUT_ROWS = "build_mpt_alibi_tensor"  # (heads, keys, ...) -> (heads, 1, keys), which MPT's attention slices


def biased(model: PreTrainedModel) -> list[Rule]:
    """Overrides of what builds ALiBi's biases in a model."""
    rules: list[Rule] = []
    for module in model.modules():
        source = sys.modules[type(module).__module__]
        if hasattr(type(module), BUILDER):
            rules.append(partial(_by_position, module))
        elif getattr(module, "use_alibi", False) and hasattr(source, BUILDER):
            rules.append(partial(_by_position, source))
        elif hasattr(type(module), WITHOUT_ROWS):
            rules.append(partial(_with_rows, module))
    return rules


def _by_position(owner: Owner, nodes: Padded, extent: int) -> Override:
    def build(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
        positions = nodes.placed(extent)
        indices = torch.ones(1, extent, dtype=torch.long, device=positions.device)
        biases = own(owner, BUILDER)(indices, heads, dtype)  # (heads, 1, extent)
        by_row: Tensor = biases[:, 0, positions]  # (heads, rows, extent)
        return by_row.transpose(0, 1).reshape(-1, 1, extent)

    return owner, BUILDER, build


def _with_rows(module: Owner, nodes: Padded, extent: int) -> Override:
    def build(heads: int, length: int, *given: Any, **options: Any) -> RowBiases:
        biases = own(module, WITHOUT_ROWS)(heads, extent, *given, **options)  # (heads, 1, extent)
        return RowBiases(biases[:, :, nodes.placed(extent)].permute(2, 0, 1, 3))

    return module, WITHOUT_ROWS, build


class RowBiases:
    """Biases (rows, heads, 1, keys) in the place of a tensor (heads, 1, keys): its slices have rows as well."""

    def __init__(self, biases: Tensor):
        self._biases, self.shape = biases, biases.shape[1:]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._biases[(slice(None), *index)]
