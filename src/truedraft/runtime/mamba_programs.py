"""Programs of models with layers of Mamba (`mixers.py`), alone or among those of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from truedraft.runtime import mixtures
from truedraft.runtime.mixers import mixer, reserve
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.state_programs import attending_of
from truedraft.runtime.weights import NotCompilable


def mamba(p: Program, model: Any) -> None:
    """Mamba, Falcon Mamba and Mamba 2: no attention; a bf16 model may keep hidden states in fp32 between the layers."""
    c, body = model.config, model.backbone
    exact = c.residual_in_fp32
    for layer in body.layers:
        reserve(p, layer.mixer)
    p.buffers(model, 0, 0, 0)
    p.embed(body.embeddings)
    p.outputs.clear()  # the first hidden states of its forward are those after the first layer
    for layer in body.layers:
        src = "x"
        if exact:
            p.copy("x", "h")
            src = "h"
        p.rms_norm(src, "h", layer.norm)
        mixer(p, "h", layer.mixer)
        p.linear("o", "t", layer.mixer.out_proj)
        p.op(OpKind.ADD, src="x", other="t", dst="x", inner=c.hidden_size, narrow=p.narrow and not exact)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, body.norm_f, once=exact))


def granite_hybrid(p: Program, model: Any) -> None:
    """Granite 4: Mamba 2 or attention, and then mixtures of experts or a feed-forward."""
    c = model.config
    layers = model.model.layers
    feeds = [mixtures.of_granite(layer) for layer in layers]
    mixtures.reserve(p, feeds)
    for layer in layers:
        if layer.mamba is not None:
            reserve(p, layer.mamba)
    p.begin(model, 0, c.embedding_multiplier, given_too=True, attention=attending_of(layers))
    count, scale = 0, c.residual_multiplier
    for layer, feed in zip(layers, feeds, strict=True):
        p.rms_norm("x", "h", layer.input_layernorm)
        if layer.mamba is not None:
            mixer(p, "h", layer.mamba)
            p.linear("o", "x", layer.mamba.out_proj, add=True, scale=scale)
        else:
            p.qkv("h", layer.self_attn, c)
            p.attend(count, layer.self_attn, c)
            p.linear("a", "x", layer.self_attn.o_proj, add=True, scale=scale)
            count += 1
        p.rms_norm("x", "h", layer.post_attention_layernorm)
        if hasattr(feed, "experts"):
            mixtures.routed(p, "h", feed, c.hidden_act)
            if scale != 1.0:
                p.copy("t", "t", scale)
            p.add("x", "t", "x")
        else:
            p.gated("h", feed, c.hidden_act)
            p.linear("g", "x", feed.down_proj, add=True, scale=scale)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm), scale=1 / c.logits_scaling)


def bamba(p: Program, model: Any) -> None:
    """Bamba: Mamba 2 or attention, and then a feed-forward; with Mamba 1 and mixtures of experts, Jamba."""
    c = model.config
    layers = model.model.layers
    feeds = [mixtures.of_jamba(layer) for layer in layers]
    mixtures.reserve(p, feeds)
    for layer in layers:
        if hasattr(layer, "mamba"):
            reserve(p, layer.mamba)
    p.begin(model, 0, attention=attending_of(layers))
    count = 0
    for layer, feed in zip(layers, feeds, strict=True):
        p.rms_norm("x", "h", layer.input_layernorm)
        if hasattr(layer, "mamba"):
            mixer(p, "h", layer.mamba)
            p.linear("o", "x", layer.mamba.out_proj, add=True)
        else:
            p.qkv("h", layer.self_attn, c)
            p.attend(count, layer.self_attn, c)
            p.linear("a", "x", layer.self_attn.o_proj, add=True)
            count += 1
        p.rms_norm("x", "h", layer.pre_ff_layernorm)
        if hasattr(feed, "experts"):
            mixtures.routed(p, "h", feed, c.hidden_act, mode=False)
            p.add("x", "t", "x")
        else:
            p.gated("h", feed, c.hidden_act)
            p.linear("g", "x", feed.down_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.final_layernorm))


def falcon_h1(p: Program, model: Any) -> None:
    """Falcon H1: attention beside Mamba 2, and then a feed-forward, with factors on nearly everything."""
    c, body = model.config, model.model
    for layer in body.layers:
        reserve(p, layer.mamba)
        values, keys = layer.mamba.intermediate_size, layer.mamba.groups_time_state_size
        p.part("mixed keys", "mixed", values)
        p.part("mixed queries", "mixed", values + keys)
    p.buffer("scaled", c.hidden_size)
    p.buffer("up", c.intermediate_size)
    p.begin(model, c.intermediate_size, c.embedding_multiplier)

    def scaled(factor: float) -> str:
        if factor == 1.0:
            return "h"
        p.copy("h", "scaled", factor)
        return "scaled"

    for i, layer in enumerate(body.layers):
        mamba, attention, mlp = layer.mamba, layer.self_attn, layer.feed_forward
        p.rms_norm("x", "h", layer.input_layernorm)
        mixer(p, scaled(mamba.ssm_in_multiplier), mamba, _factors(mamba, p.dtype))
        p.linear("o", "t", mamba.out_proj, scale=layer.ssm_out_multiplier)
        p.qkv(scaled(layer.attention_in_multiplier), attention, c)
        if attention.key_multiplier != 1.0:
            p.copy("k", "k", attention.key_multiplier)
        p.attend(i, attention, c)
        p.linear("a", "h", attention.o_proj, scale=layer.attn_out_multiplier)
        p.add("t", "h", "h")
        p.add("x", "h", "x")
        p.rms_norm("x", "h", layer.pre_ff_layernorm)
        p.linear("h", "up", mlp.up_proj, wait=False)
        p.linear("h", "g", mlp.gate_proj, scale=mlp.gate_multiplier)
        p.op(OpKind.ACTIVATE, src="g", dst="g", inner=c.intermediate_size, mode=p.activation(c.hidden_act))
        p.op(OpKind.MULTIPLY, src="g", other="up", dst="g", inner=c.intermediate_size)
        p.linear("g", "x", mlp.down_proj, add=True, scale=mlp.down_multiplier)
        p.outputs.append(len(p.ops) - 1)
    norm = body.final_layernorm
    p.end(model, lambda src, dst: p.rms_norm(src, dst, norm), scale=body.lm_head_multiplier)


def _factors(mamba: Any, dtype: torch.dtype) -> list[float]:
    """The factors of a layer's projections, one for each part of them."""
    factors, values, keys = mamba.mup_vector, mamba.intermediate_size, mamba.groups_time_state_size
    if factors.dtype != dtype:
        raise NotCompilable(f"the factors of its projections are in {factors.dtype}")
    return [factors[0, 0, at].item() for at in (0, values, 2 * values, 2 * values + keys, 2 * (values + keys))]


def nemotron_h(p: Program, model: Any) -> None:
    """Nemotron H: each layer is Mamba 2, attention without positions, a feed-forward or a mixture of these."""
    c, body = model.config, model.model
    norm = partial(p.rms_norm, once=True)
    mixers = [layer.mixer for layer in body.layers]
    for part in mixers:
        if hasattr(part, "dt_bias"):
            reserve(p, part)
        if hasattr(part, "experts"):
            mixtures.reserve_ungated(p, part)
        elif hasattr(part, "up_proj"):
            p.buffer("g", part.up_proj.out_features)
    attending = next((part for part in mixers if hasattr(part, "q_proj")), None)
    if attending is None:
        raise NotCompilable("none of its layers attends")
    p.begin(model, 0, attention=attending)
    count = 0
    for layer, part in zip(body.layers, mixers, strict=True):
        norm("x", "h", layer.norm)
        if hasattr(part, "dt_bias"):
            mixer(p, "h", part)
            p.linear("o", "x", part.out_proj, add=True)
        elif hasattr(part, "q_proj"):
            p.qkv("h", part, c)
            p.attend(count, part, c)
            p.linear("a", "x", part.o_proj, add=True)
            count += 1
        elif hasattr(part, "experts"):
            mixtures.ungated(p, "h", part, c.mlp_hidden_act)
            p.add("x", "t", "x")
        else:
            p.activated("h", part.up_proj, c.mlp_hidden_act)
            p.linear("g", "x", part.down_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: norm(src, dst, body.norm_f))


def zamba(p: Program, model: Any) -> None:
    """Zamba: Mamba 1, or in Zamba 2 Mamba 2; in some layers, attention and a feed-forward that several of these share,
    over the hidden state beside the embedding, are added to its input. In Zamba 2, the shared ones have adapters for
    each layer."""
    c, body = model.config, model.model
    shared = [getattr(layer, "shared_transformer", getattr(layer, "shared_transf", None)) for layer in body.layers]
    attention = next((block.self_attn for block in shared if block is not None), None)
    if attention is None:
        raise NotCompilable("none of its layers attends")
    for layer in body.layers:
        reserve(p, getattr(layer, "mamba_decoder", layer).mamba)
    for name, width in (("embedded", c.hidden_size), ("both", 2 * c.hidden_size)):
        p.buffer(name, width)
    if c.model_type == "zamba2":
        p.buffer("adapted", c.adapter_rank)
        p.buffer("up", c.intermediate_size)
    p.begin(model, c.intermediate_size, attention=attention)
    p.copy("x", "embedded")
    count = 0
    for layer, block in zip(body.layers, shared, strict=True):
        mamba, src = layer, "x"
        if block is not None:
            _shared(p, block, c, count)
            p.linear("h", "t", layer.linear)
            p.add("x", "t", "t")
            mamba, src = layer.mamba_decoder, "t"
            count += 1
        p.rms_norm(src, "h", mamba.input_layernorm)
        mixer(p, "h", mamba.mamba)
        p.linear("o", "x", mamba.mamba.out_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, body.final_layernorm))


def _shared(p: Program, block: Any, c: Any, count: int) -> None:
    """The attention and feed-forward of the hybrid layer with this number; the result is in "h"."""
    attention, mlp, width = block.self_attn, block.feed_forward, c.hidden_size
    for src, at in (("x", 0), ("embedded", width)):
        p.op(OpKind.PICK, src=src, dst="both", heads=1, head=width, step=width, v_at=at, wait=at != 0)
    p.rms_norm("both", "both", block.input_layernorm)
    p.qkv("both", attention, c)
    if getattr(c, "use_shared_attention_adapter", False):
        for name in "qkv":
            first, last = getattr(attention, f"linear_{name}_adapter_list")[count]
            p.linear("both", "adapted", first)
            p.linear("adapted", name, last, add=True)
    p.attend(count, attention, c)
    p.linear("a", "t", attention.o_proj)
    p.rms_norm("t", "t", block.pre_ff_layernorm)
    if hasattr(mlp, "gate_up_proj_adapter_list"):
        _adapted(p, mlp, c, count)
    else:
        p.gated("t", mlp, c.hidden_act)
    p.linear("g", "h", mlp.down_proj)


def _adapted(p: Program, mlp: Any, c: Any, count: int) -> None:
    """The hidden activations of a feed-forward with an adapter of the hybrid layer with this number, in "g"."""
    first, last = mlp.gate_up_proj_adapter_list[count]
    inner = c.intermediate_size
    p.linear("t", "adapted", first, wait=False)
    for name, rows in (("g", (0, inner)), ("up", (inner, 2 * inner))):
        p.linear("t", name, mlp.gate_up_proj, rows, wait=name == "up")
    for name, rows in (("g", (0, inner)), ("up", (inner, 2 * inner))):
        p.linear("adapted", name, last, rows, add=True, wait=name == "up")
    p.op(OpKind.ACTIVATE, src="g", dst="g", inner=inner, mode=p.activation(c.hidden_act))
    p.op(OpKind.MULTIPLY, src="g", other="up", dst="g", inner=inner)


MAMBA: dict[str, Callable[[Program, Any], None]] = {
    "mamba": mamba,
    "falcon_mamba": mamba,
    "mamba2": mamba,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "jamba": bamba,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "zamba": zamba,
    "zamba2": zamba,
}
