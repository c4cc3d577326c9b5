"""Programs of models with layers of Mamba 2, which advance their states by state-space duality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from truedraft.runtime import mixtures
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import ACTIVATIONS, Program
from truedraft.runtime.state_programs import attending_of, convolve
from truedraft.runtime.weights import NotCompilable, padded_to_16

# Some models lengthen time steps to a least one in passes of several tokens, and not in those of one. The compiled pass
# follows the latter throughout; a longer least step than this is refused.
LEAST_STEP = 1e-3


def mamba2(p: Program, model: Any) -> None:
    """Mamba 2: no attention; in a bf16 model, hidden states may be kept in fp32 between the layers."""
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
    """Bamba: Mamba 2 or attention, and then a feed-forward."""
    c = model.config
    layers = model.model.layers
    for layer in layers:
        if hasattr(layer, "mamba"):
            reserve(p, layer.mamba)
    p.begin(model, c.intermediate_size, attention=attending_of(layers))
    count = 0
    for layer in layers:
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
        p.gated("h", layer.feed_forward, c.hidden_act)
        p.linear("g", "x", layer.feed_forward.down_proj, add=True)
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


def zamba2(p: Program, model: Any) -> None:
    """Zamba 2: Mamba 2; in some layers, attention and a feed-forward that several of these share, over the hidden state
    beside the embedding, are added to its input. The shared ones have adapters for each layer."""
    c, body = model.config, model.model
    hybrids = [layer for layer in body.layers if hasattr(layer, "shared_transformer")]
    if not hybrids:
        raise NotCompilable("none of its layers attends")
    for layer in body.layers:
        reserve(p, getattr(layer, "mamba_decoder", layer).mamba)
    attention = hybrids[0].shared_transformer.self_attn
    for name, width in (
        ("embedded", c.hidden_size), ("both", 2 * c.hidden_size), ("adapted", c.adapter_rank),
        ("up", c.intermediate_size),
    ):  # fmt: skip
        p.buffer(name, width)
    p.begin(model, c.intermediate_size, attention=attention)
    p.copy("x", "embedded")
    count = 0
    for layer in body.layers:
        mamba, src = layer, "x"
        if hasattr(layer, "shared_transformer"):
            _shared(p, layer.shared_transformer, c, count)
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
    if c.use_shared_attention_adapter:
        for name in "qkv":
            first, last = getattr(attention, f"linear_{name}_adapter_list")[count]
            p.linear("both", "adapted", first)
            p.linear("adapted", name, last, add=True)
    p.attend(count, attention, c)
    p.linear("a", "t", attention.o_proj)
    p.rms_norm("t", "t", block.pre_ff_layernorm)
    first, last = mlp.gate_up_proj_adapter_list[count]
    inner = c.intermediate_size
    p.linear("t", "adapted", first, wait=False)
    for name, rows in (("g", (0, inner)), ("up", (inner, 2 * inner))):
        p.linear("t", name, mlp.gate_up_proj, rows, wait=name == "up")
    for name, rows in (("g", (0, inner)), ("up", (inner, 2 * inner))):
        p.linear("adapted", name, last, rows, add=True, wait=name == "up")
    p.op(OpKind.ACTIVATE, src="g", dst="g", inner=inner, mode=p.activation(c.hidden_act))
    p.op(OpKind.MULTIPLY, src="g", other="up", dst="g", inner=inner)
    p.linear("g", "h", mlp.down_proj)


def reserve(p: Program, layer: Any) -> None:
    """Buffers for `mixer`."""
    values, heads = layer.intermediate_size, layer.num_heads
    for name, numbers in (("mixed", layer.conv_dim), ("convolved", layer.conv_dim), ("z", values), ("o", values)):
        p.buffer(name, numbers)
    for name, numbers in (("steps", heads), ("rates", 2 * heads)):
        p.buffer(name, numbers)


def mixer(p: Program, src: str, layer: Any, factors: Sequence[float] = (1.0,) * 5) -> None:
    """A layer of Mamba 2 but for its last projection: a matrix of each head decays and takes up the outer product of a
    key and a value. The result, gated and normalised, is in "o".

    factors: of the gates, values, keys, queries and time steps, as they are projected.
    """
    heads, width, groups, size = layer.num_heads, layer.head_dim, layer.n_groups, layer.ssm_state_size
    values, keys = layer.intermediate_size, groups * size
    if width % 8 or size % 8 or values != heads * width:
        raise NotCompilable(f"heads of {size} and {width} numbers, not multiples of eight, or not {values} in all")
    least, most = getattr(layer, "time_step_limit", None) or (0.0, math.inf)
    if least > LEAST_STEP or most != math.inf:
        raise NotCompilable(f"its time steps are limited to {least} to {most}")
    ends = [values, values + layer.conv_dim, values + layer.conv_dim + heads]
    p.linear(src, "z", layer.in_proj, (0, ends[0]), scale=factors[0], wait=False)
    if set(factors[1:4]) == {1.0}:
        p.linear(src, "mixed", layer.in_proj, (ends[0], ends[1]), wait=False)
    else:
        at = ends[0]
        for name, rows, factor in zip(("", " keys", " queries"), (values, keys, keys), factors[1:4], strict=True):
            p.linear(src, f"mixed{name}", layer.in_proj, (at, at + rows), scale=factor, wait=False)
            at += rows
    p.linear(src, "steps", layer.in_proj, (ends[1], ends[2]), scale=factors[4])
    convolve(p, "mixed", "convolved", layer.conv1d, p.activation(layer.activation))
    p.op(
        OpKind.RATES, src="steps", other="steps", dst="rates", heads=heads, mode=False, bias=p.small(layer.dt_bias),
        other_bias=p.small(layer.A_log),
    )  # fmt: skip
    op = p.op(
        OpKind.RECUR, src="convolved", other="rates", dst="o", heads=heads, kv_heads=groups, head=size, step=width,
        v_at=0, k_at=values, q_at=values + keys, mode=False, bias=p.small(layer.D), narrow=False,
    )  # fmt: skip
    p.states.append((op, (heads, size, width), padded_to_16(keys + values + 2 * heads)))
    norm = layer.norm
    if isinstance(norm, nn.Identity):
        p.op(OpKind.ACTIVATE, src="z", dst="z", inner=values, mode=ACTIVATIONS["silu"])
        p.op(OpKind.MULTIPLY, src="o", other="z", dst="o", inner=values)
        return
    if getattr(norm, "norm_before_gate", False):
        raise NotCompilable("its layers of Mamba are normalised before they are gated")
    together = getattr(norm, "group_size", values // groups)
    p.op(
        OpKind.GATED_NORM, src="o", other="z", dst="o", heads=values // together, head=together,
        weight=p.small(norm.weight), eps=norm.variance_epsilon, mode=ACTIVATIONS["silu"], norm_last=True,
    )  # fmt: skip


MAMBA: dict[str, Callable[[Program, Any], None]] = {
    "mamba2": mamba2,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "zamba2": zamba2,
}
