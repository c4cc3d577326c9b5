"""Models of which each block is attention and then a mixture of experts, as lists of operations for the compiled pass.

See `programs.py`, which has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime import latents, mixtures
from truedraft.runtime.blocks import OF_GLM, blocks, complexes_of, experts, final, rotate_by_layer
from truedraft.runtime.program import SOFTPLUS, Program


def mixtral(p: Program, model: Any) -> None:
    """Mixtral, Qwen 2 MoE and, with norms over each head, Qwen 3 MoE, Mellum: mixtures of experts, dense ones among
    them."""
    c = model.config
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    per_head = 0.0 if hasattr(model.model.layers[0].self_attn, "q_norm") else None
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act, c.model_type == "mixtral"), per_head=per_head)
    final(p, model, p.rms_norm)


def deepseek(p: Program, model: Any) -> None:
    """DeepSeek 2 and 3, GLM 4.7 Flash, Youtu, MiniCPM 3: attention to latents, mixtures of experts or one feed-forward.

    MiniCPM 3 has factors on embeddings, blocks and the final hidden state.
    """
    c, layers = model.config, model.model.layers
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    mixtures.reserve(p, (layer.mlp for layer in layers))
    mixed = latents.attention(p, model)
    p.embed(model.get_input_embeddings(), scale)
    routing = mixtures.limited if c.model_type == "deepseek_v2" else mixtures.corrected
    feed = experts(p, c.hidden_act, True, routing)
    blocks(p, model, p.rms_norm, feed, scale=getattr(layers[0], "residual_scale", 1.0), mixed=mixed)

    def last(src: str, dst: str, norm: Any) -> None:
        p.rms_norm(src, dst, norm)
        if c.model_type == "minicpm3":
            p.copy(dst, dst, 1 / c.logits_scaling)

    final(p, model, last)


def dots1(p: Program, model: Any) -> None:
    """dots.llm1, GLM 4.5, Solar Open, HY 3: mixtures of experts whose router computes in fp32, dense layers among
    them."""
    c, of = model.config, mixtures.with_correction
    mixtures.reserve(p, map(of, model.model.layers))
    p.begin(model, 0)
    per_head = 0.0 if hasattr(model.model.layers[0].self_attn, "q_norm") else None
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act, True, mixtures.corrected, of), per_head=per_head)
    final(p, model, p.rms_norm)


def afmoe(p: Program, model: Any) -> None:
    """AFMoE: mixtures of experts as in dots.llm1, norms around every block, gated attention; full attention does not
    rotate."""
    c, of, layers = model.config, mixtures.with_correction, model.model.layers
    head = layers[0].self_attn.head_dim
    p.unrotated = {i for i, layer in enumerate(layers) if not layer.self_attn.is_local_attention}

    def mixed(src: str, index: int, attention: Any) -> str:
        p.linear(src, "gates", attention.gate_proj, wait=False)
        p.qkv(src, attention, c)
        p.attend(index, attention, c, per_head=0.0, norms_once=True)
        p.gate("gates", attention, c, 0, head)
        return "a"

    mixtures.reserve(p, map(of, layers))
    p.buffer("gates", c.num_attention_heads * head)
    p.begin(model, 0, c.hidden_size**0.5 if c.mup_enabled else 1.0, given_too=True)
    norm = partial(p.rms_norm, once=True)
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    blocks(p, model, norm, experts(p, c.hidden_act, True, mixtures.corrected, of), norms, mixed=mixed)
    final(p, model, norm)


def olmoe(p: Program, model: Any) -> None:
    """OLMoE: mixtures of experts, norms over all queries and keys together, which may be clipped."""
    c = model.config
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act), whole=p.rms_norm, clip=c.clip_qkv)
    final(p, model, p.rms_norm)


def minimax_m2(p: Program, model: Any) -> None:
    """MiniMax M2: mixtures of experts as in dots.llm1, norms over all queries and keys together."""
    c, of = model.config, mixtures.with_correction
    mixtures.reserve(p, map(of, model.model.layers))
    p.begin(model, 0)
    feed = experts(p, c.hidden_act, True, mixtures.corrected, of)
    blocks(p, model, p.rms_norm, feed, whole=p.rms_norm)
    final(p, model, p.rms_norm)


def phimoe(p: Program, model: Any) -> None:
    """PhiMoE: mixtures of two experts chosen one after the other, layer norms."""
    c, of = model.config, mixtures.of_phi
    mixtures.reserve(p, map(of, model.model.layers))
    p.begin(model, 0)
    blocks(p, model, p.layer_norm, experts(p, c.hidden_act, routing=mixtures.one_by_one, of=of))
    final(p, model, p.layer_norm)


def granite_moe(p: Program, model: Any) -> None:
    """Granite MoE: Granite with mixtures of experts, and perhaps a feed-forward beside each."""
    c = model.config
    rotate_by_layer(p, model)
    mixtures.reserve(p, map(mixtures.of_granite, model.model.layers))
    p.begin(model, 0, c.embedding_multiplier, given_too=True)
    feed = experts(p, c.hidden_act, of=mixtures.of_granite)
    blocks(p, model, p.rms_norm, feed, scale=c.residual_multiplier)
    final(p, model, p.rms_norm, scale=1 / c.logits_scaling)


def gpt_oss(p: Program, model: Any) -> None:
    """gpt-oss: attention with sinks, mixtures of experts with biases and clamped gates."""
    c, rotary = model.config, model.model.rotary_emb

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat([table, table], -1) for table in rotary(like, positions))

    def feed(src: str, layer: Any) -> None:
        mixtures.clamped(p, src, layer.mlp)

    norm, top = partial(p.rms_norm, once=True), c.num_experts_per_tok
    p.buffer("router", c.num_local_experts)
    p.buffer("routing", top)
    p.buffer("dealt", c.hidden_size, top)
    p.buffer("both", 2 * c.intermediate_size, top)
    p.buffer("inner", c.intermediate_size, top)
    p.begin(model, 0, rotary=tables)
    blocks(p, model, norm, feed)
    final(p, model, norm)


def llama4(p: Program, model: Any) -> None:
    """Llama 4: attention within parts of the text with norms over each head after the rotation, or to all of it without
    a rotation, its queries scaled by their positions; mixtures of experts whose inputs are scaled, dense layers among
    them."""
    c, layers = model.config, model.model.layers
    first = layers[0].self_attn
    p.unrotated = {i for i, layer in enumerate(layers) if not layer.self_attn.use_rope}
    if first.attn_temperature_tuning:
        p.factored = p.unrotated
        p.factor = lambda at: torch.log1p(torch.floor((at + 1.0) / first.floor_scale)) * first.attn_scale + 1.0

    def mixed(src: str, index: int, attention: Any) -> str:
        per_head = 0.0 if hasattr(attention, "qk_norm") else None
        p.qkv(src, attention, c)
        p.attend(index, attention, c, per_head=per_head, norms_last=True, once=True, interleaved=True)
        return "a"

    def feed(src: str, layer: Any) -> Any:
        if layer.is_moe_layer:
            mixtures.by_columns(p, src, layer.feed_forward, c.hidden_act, True, c.hidden_act)
            return None
        p.gated(src, layer.feed_forward, c.hidden_act)
        return layer.feed_forward.down_proj

    for layer in layers:
        if layer.is_moe_layer:
            mixtures.reserve_columns(p, layer.feed_forward)
        else:
            p.buffer("g", layer.feed_forward.down_proj.in_features)
    p.begin(model, 0, rotary=complexes_of(model.model.rotary_emb))
    blocks(p, model, p.rms_norm, feed, mixed=mixed)
    final(p, model, p.rms_norm)


def kolibri(p: Program, model: Any) -> None:
    """Kolibri 1: mixtures of experts, norms around every block and over each head; full attention does not rotate."""
    c = model.config
    attentions = [layer.self_attn for layer in model.model.layers]
    p.unrotated = {i for i, a in enumerate(attentions) if a.sliding_window is not None and not a.is_sliding}
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    feed = experts(p, c.hidden_act, True, mixtures.by_scores)
    blocks(p, model, p.rms_norm, feed, OF_GLM, per_head=0.0)
    final(p, model, p.rms_norm)


def laguna(p: Program, model: Any) -> None:
    """Laguna: mixtures of experts as in dots.llm1, norms over each head, gated attention; layers differ in heads."""
    c, of, layers = model.config, mixtures.of_laguna, model.model.layers
    head = layers[0].self_attn.head_dim
    sizes = [
        SimpleNamespace(
            num_attention_heads=count, num_key_value_heads=c.num_key_value_heads, sliding_window=c.sliding_window
        )
        for count in c.num_attention_heads_per_layer
    ]

    def mixed(src: str, index: int, attention: Any) -> str:
        p.linear(src, "gates", attention.g_proj, wait=False)
        p.qkv(src, attention, sizes[index])
        p.attend(index, attention, sizes[index], per_head=0.0)
        p.gate("gates", attention, sizes[index], 0, 1 if attention.gate_per_head else head, SOFTPLUS)
        return "a"

    mixtures.reserve(p, map(of, layers))
    for name in ("q", "a", "gates"):
        p.buffer(name, max(c.num_attention_heads_per_layer) * head)
    p.begin(model, 0)
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act, False, mixtures.corrected, of), mixed=mixed)
    final(p, model, p.rms_norm)


def flint(p: Program, model: Any) -> None:
    """Flint: mixtures of experts, dense ones among them; norms over each head; full attention does not rotate."""
    c, norm = model.config, partial(p.rms_norm, once=True)
    p.unrotated = {i for i, layer in enumerate(model.model.layers) if layer.self_attn.sliding_window is None}
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    feed = experts(p, c.hidden_act, True, mixtures.uncorrected)
    blocks(p, model, norm, feed, per_head=0.0, norms_once=True)
    final(p, model, norm)


def aria(p: Program, model: Any) -> None:
    """Aria: Llama with mixtures of experts beside a feed-forward."""
    c = model.config

    def feed(src: str, layer: Any) -> None:
        mixtures.by_columns(p, src, layer.mlp, c.hidden_act, False, "silu")

    for layer in model.model.layers:
        mixtures.reserve_columns(p, layer.mlp)
    p.begin(model, 0)
    blocks(p, model, p.rms_norm, feed)
    final(p, model, p.rms_norm)


MIXTURES: dict[str, Callable[[Program, Any], None]] = {
    "dots1": dots1,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "glm4_moe_lite": deepseek,
    "youtu": deepseek,
    "minicpm3": deepseek,
    "glm4_moe": dots1,
    "glm4v_moe_text": dots1,
    "solar_open": dots1,
    "hy_v3": dots1,
    "afmoe": afmoe,
    "minimax_m2": minimax_m2,
    "phimoe": phimoe,
    "mellum": mixtral,
    "granitemoe": granite_moe,
    "granitemoe_swa": granite_moe,
    "granitemoeshared": granite_moe,
    "gpt_oss": gpt_oss,
    "llama4_text": llama4,
    "aria_text": aria,
    "kolibri1": kolibri,
    "flint": flint,
    "laguna": laguna,
    "mixtral": mixtral,
    "qwen2_moe": mixtral,
    "qwen3_moe": mixtral,
    "qwen3_vl_moe_text": mixtral,
    "olmoe": olmoe,
}
