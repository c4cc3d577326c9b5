"""Models as checkpoints with code of their own have them: of no class of transformers, and run by their own forward."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from models import V, tiny


class ReluMixture(nn.Module):
    """A mixture of small experts, of which a token is given those that a ReLU leaves; all are computed.

    joined: whether the matrices of all experts are one.
    """

    def __init__(self, hidden: int, experts: int, inner: int, joined: bool, norm: bool = True):
        super().__init__()
        self.experts_in_all, self.joined = experts, joined
        self.router_proj = nn.Linear(hidden, experts, bias=False)
        self.router_act_fn, self.act_fn = ACT2FN["relu"], ACT2FN["silu"]
        if norm:
            self.router_norm = LlamaRMSNorm(experts)
        up, down = torch.randn(experts, inner, hidden), torch.randn(experts, hidden, inner)
        if joined:
            up, down = up.reshape(-1, hidden), down.transpose(0, 1).reshape(hidden, -1)
        self.up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router_act_fn(self.router_proj(x))
        if hasattr(self, "router_norm"):
            weights = self.router_norm(weights)
        if self.joined:
            inner = self.act_fn(nn.functional.linear(x, self.up_proj)).unflatten(-1, (self.experts_in_all, -1))
            return nn.functional.linear((inner * weights[..., None]).flatten(-2), self.down_proj)
        inner = self.act_fn(torch.einsum("...h,eih->...ei", x, self.up_proj))
        return torch.einsum("...ei,ehi,...e->...h", inner, self.down_proj, weights)


class ReluRoutedForCausalLM(LlamaForCausalLM):
    """Llama with such mixtures as feed-forwards."""


@cache
def relu_routed(
    dtype: torch.dtype = torch.float64, sharpen: float = 3.0, vocabulary: int = V, experts: int = 12,
    joined: bool = False,
) -> PreTrainedModel:  # fmt: skip
    like = tiny("llama", dtype, sharpen, vocabulary)
    model: Any = ReluRoutedForCausalLM(copy.deepcopy(like.config)).eval()
    model.load_state_dict(like.state_dict())
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp = ReluMixture(model.config.hidden_size, experts, 8, joined)
        with torch.no_grad():
            for weight in (layer.mlp.up_proj, layer.mlp.down_proj):
                weight.mul_(0.2)
    made: PreTrainedModel = model.to(dtype)
    return made
