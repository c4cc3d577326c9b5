"""Programs of models with states: layers of the gated delta rule, of short convolutions or of lightning attention among
those of attention."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from truedraft.runtime import mixtures
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import SIGMOID, Program
from truedraft.runtime.weights import NotCompilable, padded_to_16

MOST_INPUTS = 8  # of a channel of a convolution, as TAPS in native/recurrent.inc


def qwen3_5(p: Program, model: Any) -> None:
    """Qwen 3.5 and 3 Next, dense and with mixtures of experts: three layers of the gated delta rule to one of gated
    attention."""
    c = model.config
    layers = model.model.layers
    attending = attending_of(layers)
    mixtures.reserve(p, (layer.mlp for layer in layers))
    reserve_delta(p, (layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")))
    p.buffer("queries", 2 * c.num_attention_heads * attending.head_dim)
    p.begin(model, getattr(c, "intermediate_size", 0), attention=attending)
    count = 0
    for layer in layers:
        p.rms_norm("x", "h", layer.input_layernorm, 1.0)
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn
            p.linear("h", "queries", attention.q_proj, wait=False)
            p.linear("h", "k", attention.k_proj, wait=False)
            p.linear("h", "v", attention.v_proj)
            p.attend(count, attention, c, per_head=1.0, gated="queries")
            p.linear("a", "x", attention.o_proj, add=True)
            count += 1
        else:
            gated_delta(p, "h", layer.linear_attn)
            p.linear("o", "x", layer.linear_attn.out_proj, add=True)
        p.rms_norm("x", "h", layer.post_attention_layernorm, 1.0)
        if hasattr(layer.mlp, "experts"):
            mixtures.routed(p, "h", layer.mlp, c.hidden_act)
            p.add("x", "t", "x")
        else:
            p.gated("h", layer.mlp, c.hidden_act)
            p.linear("g", "x", layer.mlp.down_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm, 1.0))


def olmo_hybrid(p: Program, model: Any) -> None:
    """OLMo Hybrid: layers of the gated delta rule, after norms, and of attention, before them."""
    c = model.config
    layers = model.model.layers
    norm = partial(p.rms_norm, once=True)
    reserve_delta(p, (layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")))
    p.begin(model, c.intermediate_size, attention=attending_of(layers))
    count = 0
    for layer in layers:
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn
            p.qkv("x", attention, c, norm)
            p.attend(count, attention, c, once=True)
            p.linear("a", "t", attention.o_proj)
            norm("t", "t", layer.post_attention_layernorm)
            p.add("x", "t", "x")
            p.gated("x", layer.mlp, c.hidden_act)
            p.linear("g", "t", layer.mlp.down_proj)
            norm("t", "t", layer.post_feedforward_layernorm)
            p.add("x", "t", "x")
            count += 1
        else:
            norm("x", "h", layer.input_layernorm)
            gated_delta(p, "h", layer.linear_attn)
            p.linear("o", "x", layer.linear_attn.o_proj, add=True)
            norm("x", "h", layer.post_attention_layernorm)
            p.gated("h", layer.mlp, c.hidden_act)
            p.linear("g", "x", layer.mlp.down_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: norm(src, dst, model.model.norm))


def attending_of(layers: Iterable[Any]) -> Any:
    """The attention of the first layer that has any."""
    for layer in layers:
        if getattr(layer, "self_attn", None) is not None:
            return layer.self_attn
    raise NotCompilable("none of its layers attends")


def lfm(p: Program, model: Any) -> None:
    """LFM 2 and 3: gated short convolutions among layers of attention; in LFM 3 with norms after both parts of a layer
    and gates of the heads."""
    c = model.config
    layers = model.model.layers
    attending = attending_of(layers)
    for name in ("before", "after", "o"):
        p.buffer(name, c.hidden_size)
    feeds = [_Named(layer.feed_forward) for layer in layers]
    mixtures.reserve(p, feeds)
    gated = getattr(attending, "g_proj", None) is not None
    if gated:
        p.buffer("gates", c.num_attention_heads)
    rotary = getattr(model.model, "rotary_emb", None) or getattr(model.model, "pos_emb", None)
    p.begin(model, 0, attention=attending, rotary=rotary)

    def leave(src: str, last: Any, norm: Any) -> None:
        if type(norm) in (type(None), nn.Identity):
            p.linear(src, "x", last, add=True)
            return
        p.linear(src, "t", last)
        p.rms_norm("t", "t", norm)
        p.add("x", "t", "x")

    count = 0
    for layer, feed in zip(layers, feeds, strict=True):
        p.rms_norm("x", "h", layer.operator_norm)
        if layer.is_attention_layer:
            attention = layer.self_attn
            if gated:
                p.linear("h", "gates", attention.g_proj, wait=False)
            p.qkv("h", attention, c)
            p.attend(count, attention, c, per_head=0.0, once=c.model_type == "lfm3")
            if gated:
                p.gate("gates", attention, c, 0, 1)
            src, last = "a", getattr(attention, "out_proj", None) or attention.o_proj
            count += 1
        else:
            _gated_convolution(p, layer.conv)
            src, last = "o", layer.conv.out_proj
        leave(src, last, getattr(layer, "post_operator_norm", None))
        p.rms_norm("x", "h", layer.ffn_norm)
        if hasattr(feed, "experts"):
            routing = mixtures.by_sigmoids(p, feed.gate, feed.expert_bias, 1e-6)
            mixtures.routed(p, "h", feed, "silu", **routing)
            p.add("x", "t", "x")
        else:
            p.gated("h", feed, "silu")
            leave("g", feed.down_proj, getattr(layer, "post_ffn_norm", None))
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.embedding_norm))


def minimax(p: Program, model: Any) -> None:
    """MiniMax: lightning attention or attention, and then a mixture of experts; residuals begin behind the norms."""
    c, layers = model.config, model.model.layers
    mixtures.reserve(p, (layer.mlp for layer in layers))
    attending = layers[0].self_attn
    inputs = c.num_attention_heads * attending.head_dim
    for name, width in (("grouped", 3 * inputs), ("mixed", 3 * inputs), ("gates", inputs)):
        p.buffer(name, width)
    p.begin(model, 0, attention=attending)
    count = 0
    for layer in layers:
        attention = layer.self_attn
        p.rms_norm("x", "h", layer.input_layernorm)
        if layer.block_type == "linear_attention":
            _lightning(p, "h", attention, c)
            last = attention.out_proj
        else:
            p.qkv("h", attention, c)
            p.attend(count, attention, c)
            last = attention.o_proj
            count += 1
        p.copy("h", "x", layer.attn_alpha_factor)
        p.linear("a", "x", last, add=True, scale=layer.attn_beta_factor)
        p.rms_norm("x", "h", layer.post_attention_layernorm)
        p.copy("h", "x", layer.mlp_alpha_factor)
        mixtures.routed(p, "h", layer.mlp, c.hidden_act, exact=True)
        p.copy("t", "t", layer.mlp_beta_factor)
        p.add("x", "t", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm))


def _lightning(p: Program, src: str, layer: Any, c: Any) -> None:
    """Lightning attention: a matrix of each head decays at a rate of its own and takes up the outer product of a key
    and a value. The result, normalised and gated, is in "a"."""
    heads, size = layer.num_attention_heads, layer.head_dim
    if size % 8:
        raise NotCompilable(f"heads of {size} numbers, not a multiple of eight")
    width = heads * size
    p.linear(src, "gates", layer.output_gate, wait=False)
    p.linear(src, "grouped", layer.qkv_proj)
    p.op(OpKind.ACTIVATE, src="grouped", dst="grouped", inner=3 * width, mode=p.activation(c.hidden_act))
    for part in range(3):  # queries, keys and values, which are side by side in each head
        p.op(
            OpKind.PICK, src="grouped", dst="mixed", heads=heads, head=size, step=3 * size, k_at=part * size,
            v_at=part * width, wait=part == 2,
        )  # fmt: skip
    kept = torch.exp(-layer.slope_rate).flatten().float()
    p.kept.append(rates := torch.cat([kept, torch.ones(heads)]))
    op = p.op(
        OpKind.RECUR, src="mixed", dst="a", heads=heads, kv_heads=heads, head=size, step=size, k_at=width,
        v_at=2 * width, other_bias=rates.data_ptr(),
    )  # fmt: skip
    p.states.append((op, (heads, size, size), padded_to_16(2 * width + 2 * heads)))
    p.rms_norm("a", "a", layer.norm)
    p.gate("gates", layer, c, 0, size)


class _Named:
    """A feed-forward of LFM by the names of others."""

    def __init__(self, mlp: Any):
        if hasattr(mlp, "experts"):
            self.gate, self.experts, self.expert_bias = mlp.gate, mlp.experts, getattr(mlp, "expert_bias", None)
        else:
            self.gate_proj, self.up_proj, self.down_proj = mlp.w1, mlp.w3, mlp.w2


def reserve_delta(p: Program, layers: Iterable[Any]) -> None:
    """Buffers for `gated_delta`."""
    for layer in layers:
        keys, values, heads = layer.key_dim, layer.value_dim, layer.num_v_heads
        inputs = 2 * keys + values
        for name, numbers in (("mixed", inputs), ("convolved", inputs), ("z", values), ("o", values)):
            p.buffer(name, numbers)
        for name, numbers in (("steps", heads), ("beta", heads), ("rates", 2 * heads)):
            p.buffer(name, numbers)
        if hasattr(layer, "in_proj_qkvz"):
            p.buffer("grouped", layer.in_proj_qkvz.out_features)
            p.buffer("grouped rates", layer.in_proj_ba.out_features)
        elif hasattr(layer, "q_proj"):
            p.part("mixed keys", "mixed", keys)
            p.part("mixed values", "mixed", 2 * keys)


def _projected(p: Program, src: str, layer: Any) -> None:
    """Queries, keys and values of the gated delta rule in "mixed", gates in "z", and what rates are made of in "steps"
    and "beta"."""
    if hasattr(layer, "in_proj_qkv"):
        p.linear(src, "mixed", layer.in_proj_qkv, wait=False)
        p.linear(src, "z", layer.in_proj_z, wait=False)
        p.linear(src, "steps", layer.in_proj_a, wait=False)
        p.linear(src, "beta", layer.in_proj_b)
    elif hasattr(layer, "in_proj_qkvz"):  # grouped by heads of keys
        p.linear(src, "grouped", layer.in_proj_qkvz, wait=False)
        p.linear(src, "grouped rates", layer.in_proj_ba)
        heads = layer.num_k_heads
        size, rates = layer.head_k_dim, layer.num_v_heads // heads
        values = rates * layer.head_v_dim
        for of, dst, at, numbers, to in (
            ("grouped", "mixed", 0, size, 0),
            ("grouped", "mixed", size, size, layer.key_dim),
            ("grouped", "mixed", 2 * size, values, 2 * layer.key_dim),
            ("grouped", "z", 2 * size + values, values, 0),
            ("grouped rates", "beta", 0, rates, 0),
            ("grouped rates", "steps", rates, rates, 0),
        ):
            step = 2 * (size + values) if of == "grouped" else 2 * rates
            p.op(
                OpKind.PICK, src=of, dst=dst, heads=heads, head=numbers, step=step, k_at=at, v_at=to,
                wait=dst == "steps",
            )  # fmt: skip
    else:
        p.linear(src, "mixed", layer.q_proj, wait=False)
        p.linear(src, "mixed keys", layer.k_proj, wait=False)
        p.linear(src, "mixed values", layer.v_proj, wait=False)
        p.linear(src, "z", layer.g_proj, wait=False)
        p.linear(src, "steps", layer.a_proj, wait=False)
        p.linear(src, "beta", layer.b_proj)


def gated_delta(p: Program, src: str, layer: Any) -> None:
    """The gated delta rule: a matrix of each head is corrected so that it answers the key with the value. The result,
    normalised and gated, is in "o"."""
    heads, width, size = layer.num_v_heads, layer.head_v_dim, layer.head_k_dim
    if width % 8 or size % 8:
        raise NotCompilable(f"heads of {size} and {width} numbers, not multiples of eight")
    _projected(p, src, layer)
    p.op(OpKind.ACTIVATE, src="beta", dst="beta", inner=heads, mode=SIGMOID)
    if getattr(layer, "allow_neg_eigval", False):
        p.copy("beta", "beta", 2.0)
    convolve(p, "mixed", "convolved", layer.conv1d, p.activation(layer.activation))
    p.op(
        OpKind.RATES, src="steps", other="beta", dst="rates", heads=heads, mode=True, bias=p.small(layer.dt_bias),
        other_bias=p.small(layer.A_log),
    )  # fmt: skip
    keys = layer.num_k_heads * size
    op = p.op(
        OpKind.RECUR, src="convolved", other="rates", dst="o", heads=heads, kv_heads=layer.num_k_heads, head=size,
        step=width, k_at=keys, v_at=2 * keys, scale=size**-0.5, mode=True,
    )  # fmt: skip
    p.states.append((op, (heads, size, width), padded_to_16(keys + heads * width + 2 * heads)))
    norm = getattr(layer, "norm", None) or layer.o_norm
    p.op(
        OpKind.GATED_NORM, src="o", other="z", dst="o", heads=heads, head=width, weight=p.small(norm.weight),
        eps=norm.variance_epsilon, mode=p.activation(norm.activation),
    )  # fmt: skip


def _gated_convolution(p: Program, layer: Any) -> None:
    """A convolution of gated inputs, whose result is gated: from "h" to "o"."""
    width = layer.in_proj.out_features // 3
    for at, name in enumerate(("before", "after", "o")):
        p.linear("h", name, layer.in_proj, (at * width, (at + 1) * width), wait=at == 2)
    p.op(OpKind.MULTIPLY, src="before", other="o", dst="before", inner=width)
    convolve(p, "before", "o", layer.conv, -1)
    p.op(OpKind.MULTIPLY, src="after", other="o", dst="o", inner=width)


def convolve(p: Program, src: str, dst: str, conv: Any, activation: int) -> None:
    """A causal convolution of each channel by itself, and an activation; -1 for none."""
    channels, _, inputs = conv.weight.shape
    if channels % 8 or inputs > MOST_INPUTS or conv.groups != channels:
        raise NotCompilable(f"a convolution of {channels} channels over {inputs} inputs in {conv.groups} groups")
    rows = torch.zeros(inputs, padded_to_16(channels))
    p.kept.append(rows)
    for row, column in zip(rows, conv.weight[:, 0].unbind(1), strict=True):
        p.copy_into(row[:channels], column)
    bias = None if conv.bias is None else p.small(conv.bias)
    op = p.op(
        OpKind.CONVOLVE, src=src, dst=dst, inner=channels, head=inputs, weight=rows.data_ptr(), bias=bias,
        mode=activation,
    )  # fmt: skip
    p.states.append((op, (inputs - 1, padded_to_16(channels)), padded_to_16(channels)))
