"""Input embeddings of a pass in which some probes are no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truedraft.tree import DraftTree


def embedded(model: Any, trees: Sequence[DraftTree], width: int, device: torch.device) -> Tensor | None:
    """(rows, width, H) input embeddings of trees: those of tokens, and the vectors of probes that have them; rows are
    padded with copies of their last nodes. None where all nodes are tokens.

    Raises:
        ValueError: a probe's embedding is not a vector of the model's hidden size.
    """
    if not any(tree.embeds for tree in trees):
        return None
    with torch.no_grad():
        return _embedded(model, trees, width, device)


def _embedded(model: Any, trees: Sequence[DraftTree], width: int, device: torch.device) -> Tensor:
    ids = [[*tree.tokens, *tree.tokens[-1:] * (width - len(tree))] for tree in trees]
    inputs: Tensor = model.get_input_embeddings()(torch.tensor(ids, device=device)).clone()
    for row, tree in zip(inputs, trees, strict=True):
        for node, vector in tree.embeds.items():
            if vector.shape != row.shape[1:]:
                raise ValueError(
                    f"the embedding of a probe is {tuple(vector.shape)}, the model's are {row.shape[1]} wide"
                )
            row[node : node + 1 if node < len(tree) - 1 else width] = vector
    return inputs
