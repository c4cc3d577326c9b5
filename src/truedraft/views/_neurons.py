"""Predictors of the neurons of feed-forwards that matter for a token, and what a pass does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PANEL = 16  # rows of weights that lie together in memory where they are copied, as in pass.c
EPS = 1e-6  # added to the mean of the squares of hidden states


class Predictors(nn.Module):
    """By layer of a decoder, a small MLP over its input hidden state, which is divided by its root mean square: a score
    for each group of its neurons.

    Args:
        hidden: size of hidden states.
        groups: by layer, of adjacent neurons that are chosen together.
        size: neurons of a group.
        rank: of the MLP; a multiple of sixteen.
    """

    def __init__(self, hidden: int, groups: Sequence[int], size: int, rank: int):
        super().__init__()
        self.hidden, self.groups, self.size, self.rank = hidden, list(groups), size, rank
        single = torch.float32
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, rank, dtype=single), nn.ReLU(), nn.Linear(rank, count, dtype=single))
            for count in groups
        )

    def forward(self, layer: int, states: Tensor) -> Tensor:
        """Scores (..., groups) from the layer's input (..., H)."""
        states = states.float()
        scores: Tensor = self.layers[layer](states * (states.square().mean(-1, keepdim=True) + EPS).rsqrt())
        return scores


@dataclass(frozen=True)
class Neurons:
    """The neurons of feed-forwards that run: in each layer the groups with the highest scores for a token.

    kept: share of the groups of a layer, at least one of them.
    """

    predictors: Predictors
    kept: float

    def __str__(self) -> str:
        return f"{self.kept:.0%} of the neurons, as predicted"

    def count(self, layer: int) -> int:
        """Groups of a layer that run for a token."""
        return max(round(self.kept * self.predictors.groups[layer]), 1)

    def chosen(self, layer: int, states: Tensor) -> Tensor:
        """(..., groups) bool from the layer's input (..., H): whether a group runs."""
        return highest(self.predictors(layer, states), self.count(layer))


def highest(scores: Tensor, count: int) -> Tensor:
    """Whether a score is among the `count` highest of its row; of equal ones the first are."""
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
