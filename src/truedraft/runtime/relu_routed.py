"""Mixtures of experts whose router ends in a ReLU, so that each token has as many experts as are active (BlockFFN).

y = sum over experts e of  w_e  down_e act(up_e x),  with  w = norm(relu(router x))  or without the norm; experts whose
weight is zero need not be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from truedraft.errors import Refused
from truedraft.views._base import Experts

PARTS = ("router_proj", "router_act_fn", "act_fn", "up_proj", "down_proj")


def relu_routed(module: nn.Module) -> bool:
    """Whether a module has the parts of such a mixture."""
    return all(hasattr(module, part) for part in PARTS) and isinstance(module.up_proj, nn.Parameter)


class ReluRouted:
    """One such mixture: E experts of I numbers each, for hidden states of H.

    module: `router_proj` of H to E, `router_act_fn`, `router_norm` of E where it has one, `act_fn`, and parameters
        `up_proj` (E, I, H) or (E I, H) and `down_proj` (E, H, I) or (H, E I).

    Raises:
        Refused: it computes something else, as a call over random states shows.
    """

    def __init__(self, module: Any):
        self.module = module
        self._check()

    def __len__(self) -> int:
        return int(self.module.router_proj.out_features)

    def forward(self, experts: Experts) -> Callable[[Tensor], Tensor]:
        """Its forward over (..., H), where each token is given these experts at most; those of no token are not
        read."""

        def forward(states: Tensor) -> Tensor:
            x = states.reshape(-1, states.shape[-1])
            weights = chosen(self._weights(x), experts)
            ups, downs, out = *self._matrices(), torch.zeros_like(x)
            for expert in weights.any(0).nonzero()[:, 0].tolist():
                inner = self.module.act_fn(linear(x, ups[expert])) * weights[:, expert, None]
                out += linear(inner, downs[expert])
            return out.view_as(states)

        return forward

    def _weights(self, x: Tensor) -> Tensor:
        """Router weights (n, E) of n states."""
        norm, scores = getattr(self.module, "router_norm", None), self.module.router_act_fn(self.module.router_proj(x))
        return scores if norm is None else norm(scores)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Those of all experts: (E, I, H) and (E, H, I)."""
        up, down, count = self.module.up_proj, self.module.down_proj, len(self)
        if up.ndim == 2:
            up, down = up.unflatten(0, (count, -1)), down.unflatten(1, (count, -1)).transpose(0, 1)
        return up, down

    @torch.no_grad()
    def _check(self) -> None:
        weight = self.module.router_proj.weight
        states = torch.randn(1, 2, weight.shape[1], generator=torch.Generator().manual_seed(0))
        states = states.to(weight.device, weight.dtype)
        name = type(self.module).__name__
        try:
            own, mine = self.module(states), self.forward(Experts(len(self)))(states)
        except (TypeError, RuntimeError) as error:
            raise Refused(
                f"the experts of {name} cannot be fewer: its parts are not of the sizes of a mixture"
            ) from error
        if not torch.is_tensor(own) or own.shape != mine.shape or not torch.allclose(own, mine, rtol=1e-2, atol=1e-2):
            raise Refused(f"the experts of {name} cannot be fewer: it does more than add them by their router weights")


def chosen(weights: Tensor, experts: Experts) -> Tensor:
    """Router weights (n, E), zero but for the largest ones of each token."""
    sizes = weights.abs()
    strongest = sizes.topk(min(experts.most, weights.shape[-1]))
    dropped = torch.ones_like(weights, dtype=torch.bool).scatter(-1, strongest.indices, False)
    return weights.masked_fill(dropped | (sizes < experts.least * strongest.values[..., :1]), 0.0)
