"""Input embeddings of a pass in which some probes are no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from truedraft.errors import Refused
from truedraft.tree import DraftTree

FACTORED = {"falcon_h1"}  # model types that multiply embeddings of tokens, but not embeddings that are given


def embedded(model: Any, trees: Sequence[DraftTree], width: int, device: torch.device) -> Tensor | None:
    """(rows, width, H) input embeddings of trees: those of tokens, and the vectors of probes that have them; rows are
    padded with copies of their last nodes. None where all nodes are tokens.

    Raises:
        Refused: see `check_embeddings_given`.
        ValueError: a probe's embedding is not a vector of the model's hidden size.
    """
    if not any(tree.embeds for tree in trees):
        return None
    check_embeddings_given(model)
    with torch.no_grad():
        return _embedded(model, trees, width, device)


def check_embeddings_given(model: Any) -> None:
    """Raises Refused where embeddings cannot take the place of tokens."""
    if getattr(model.config.get_text_config(decoder=True), "hidden_size_per_layer_input", None):
        raise Refused(
            f"{type(model).__name__} reads an embedding of each token in every layer, which given embeddings lack: "
            "give input_ids"
        )


def token_embeddings(model: Any, ids: Tensor) -> Tensor:
    """The embeddings of tokens as a model's layers read them, given in the place of ids; (..., H)."""
    config = model.config.get_text_config(decoder=True)
    factor = config.embedding_multiplier if config.model_type in FACTORED else 1.0
    found: Tensor = model.get_input_embeddings()(ids)
    return found if factor == 1.0 else found * factor


def _embedded(model: Any, trees: Sequence[DraftTree], width: int, device: torch.device) -> Tensor:
    ids = [[*tree.tokens, *tree.tokens[-1:] * (width - len(tree))] for tree in trees]
    inputs = token_embeddings(model, torch.tensor(ids, device=device)).clone()
    for row, tree in zip(inputs, trees, strict=True):
        for node, vector in tree.embeds.items():
            if vector.shape != row.shape[1:]:
                raise ValueError(
                    f"the embedding of a probe is {tuple(vector.shape)}, the model's are {row.shape[1]} wide"
                )
            row[node : node + 1 if node < len(tree) - 1 else width] = vector
    return inputs
