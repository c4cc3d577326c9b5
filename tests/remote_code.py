"""Models as checkpoints with code of their own have them: of no class of transformers, and run by their own forward."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

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


WINDOW = 5


class Attention(LlamaAttention):
    """Attention, of a window where there is one; its mask is the model's."""

    def __init__(self, config: Any, layer: int, window: int | None):
        super().__init__(config, layer)
        self.window_size = window


class Stateful(nn.Module):
    """A sum over earlier tokens, in a cache that has states by layer."""

    def __init__(self, hidden: int, layer: int):
        super().__init__()
        self.layer, self.proj = layer, nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> tuple[Tensor, None]:
        sums = hidden_states.cumsum(1)
        if past_key_values is not None:
            before = past_key_values.recurrent_states[self.layer]
            sums = past_key_values.recurrent_states[self.layer] = sums if before is None else sums + before
        return self.proj(sums), None


class Mixers(nn.Module):
    """The mixers of a layer, of which `main_mixer_name` is active."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.strategy, self.main_mixer_name = "uniform", "attention"
        self.mixers = nn.ModuleDict(
            {
                "attention": Attention(config, layer, None), "window": Attention(config, layer, WINDOW),
                "states": Stateful(config.hidden_size, layer),
            }
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, attention_mask: dict[str, Any], **kwargs: Any) -> Any:
        name = self.main_mixer_name
        return self.mixers[name](hidden_states, attention_mask=attention_mask.get(name), **kwargs)


class SupernetModel(LlamaModel):
    def __init__(self, config: Any):
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.self_attn = Mixers(config, i)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None, past_key_values: Any = None, inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None, **kwargs: Any,
    ) -> BaseModelOutputWithPast:  # fmt: skip
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if position_ids is None:
            begun = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(begun, begun + x.shape[1], device=x.device)[None]
        config = SimpleNamespace(**{**vars(self.config), "_attn_implementation": "sdpa", "sliding_window": WINDOW})
        makers = {"attention": create_causal_mask, "window": create_sliding_window_causal_mask}
        masks = {
            name: make(
                config=config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past_key_values,
                position_ids=position_ids,
            )
            for name, make in makers.items()
        }  # fmt: skip
        rotary = self.rotary_emb(x, position_ids=position_ids)
        for layer in self.layers:
            given = dict(attention_mask=masks, position_embeddings=rotary, past_key_values=past_key_values)
            x = layer(x, **given, position_ids=position_ids, use_cache=use_cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class SupernetForCausalLM(LlamaForCausalLM):
    """Llama whose layers have several mixers of tokens."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = SupernetModel(config)


@cache
def supernet(dtype: torch.dtype = torch.float64, sharpen: float = 3.0, vocabulary: int = V) -> PreTrainedModel:
    config = copy.deepcopy(tiny("llama", dtype, sharpen, vocabulary).config)
    torch.manual_seed(4)
    model = SupernetForCausalLM(config).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim == 2:
                weights.normal_(std=0.02 * sharpen)
    made: PreTrainedModel = model.to(dtype)
    return made


def place(model: Any, *names: str) -> Any:
    """A copy of a supernet with these mixers active, by layer."""
    made = copy.deepcopy(model)
    for layer, name in zip(made.model.layers, names, strict=True):
        layer.self_attn.main_mixer_name = name
    return made
