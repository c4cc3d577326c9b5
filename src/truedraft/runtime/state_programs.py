"""Programs of models with states: layers of the gated delta rule or of short convolutions among those of attention."""

from __future__ import annotations

from typing import Any

import torch

from truedraft.runtime import mixtures
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import SIGMOID, Program
from truedraft.runtime.weights import NotCompilable

MOST_INPUTS = 8  # of a channel of a convolution, as TAPS in native/recurrent.inc


def qwen3_5(p: Program, model: Any) -> None:
    """Qwen 3.5, dense and with mixtures of experts: three layers of the gated delta rule to one of gated attention."""
    c = model.config
    layers = model.model.layers
    attending = next((layer.self_attn for layer in layers if hasattr(layer, "self_attn")), None)
    if attending is None:
        raise NotCompilable("none of its layers attends")
    mixtures.reserve(p, (layer.mlp for layer in layers))
    for layer in layers:
        if hasattr(layer, "linear_attn"):
            reserve_delta(p, layer.linear_attn)
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


def lfm2(p: Program, model: Any) -> None:
    """LFM 2: gated short convolutions among layers of attention."""
    c = model.config
    layers = model.model.layers
    attending = next((layer.self_attn for layer in layers if layer.is_attention_layer), None)
    if attending is None:
        raise NotCompilable("none of its layers attends")
    for name in ("before", "after", "o"):
        p.buffer(name, c.hidden_size)
    rotary = getattr(model.model, "rotary_emb", None) or getattr(model.model, "pos_emb", None)
    p.begin(model, layers[0].feed_forward.w1.out_features, attention=attending, rotary=rotary)
    count = 0
    for layer in layers:
        p.rms_norm("x", "h", layer.operator_norm)
        if layer.is_attention_layer:
            p.qkv("h", layer.self_attn, c)
            p.attend(count, layer.self_attn, c, per_head=0.0)
            p.linear("a", "x", layer.self_attn.out_proj, add=True)
            count += 1
        else:
            _gated_convolution(p, layer.conv)
            p.linear("o", "x", layer.conv.out_proj, add=True)
        p.rms_norm("x", "h", layer.ffn_norm)
        p.gated("h", _Named(layer.feed_forward), "silu")
        p.linear("g", "x", layer.feed_forward.w2, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.embedding_norm))


class _Named:
    """A feed-forward of LFM by the names of others."""

    def __init__(self, mlp: Any):
        self.gate_proj, self.up_proj = mlp.w1, mlp.w3


def reserve_delta(p: Program, layer: Any) -> None:
    """Buffers for `gated_delta`."""
    inputs, values = layer.in_proj_qkv.out_features, layer.in_proj_z.out_features
    for name, numbers in (("mixed", inputs), ("convolved", inputs), ("z", values), ("o", values)):
        p.buffer(name, numbers)
    for name, numbers in (("steps", layer.num_v_heads), ("beta", layer.num_v_heads), ("rates", 2 * layer.num_v_heads)):
        p.buffer(name, numbers)


def gated_delta(p: Program, src: str, layer: Any) -> None:
    """The gated delta rule: a matrix of each head is corrected so that it answers the key with the value. The result,
    normalised and gated, is in "o"."""
    heads, width, size = layer.num_v_heads, layer.head_v_dim, layer.head_k_dim
    if width % 8 or size % 8:
        raise NotCompilable(f"heads of {size} and {width} numbers, not multiples of eight")
    p.linear(src, "mixed", layer.in_proj_qkv, wait=False)
    p.linear(src, "z", layer.in_proj_z, wait=False)
    p.linear(src, "steps", layer.in_proj_a, wait=False)
    p.linear(src, "beta", layer.in_proj_b)
    p.op(OpKind.ACTIVATE, src="beta", dst="beta", inner=heads, mode=SIGMOID)
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
    p.states.append((op, (heads, size, width), _padded(keys + heads * width + 2 * heads)))
    norm = layer.norm
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
    rows = torch.zeros(inputs, _padded(channels))
    p.kept.append(rows)
    for row, column in zip(rows, conv.weight[:, 0].unbind(1), strict=True):
        p.copy_into(row[:channels], column)
    bias = None if conv.bias is None else p.small(conv.bias)
    op = p.op(
        OpKind.CONVOLVE, src=src, dst=dst, inner=channels, head=inputs, weight=rows.data_ptr(), bias=bias,
        mode=activation,
    )  # fmt: skip
    p.states.append((op, (inputs - 1, _padded(channels)), _padded(channels)))


def _padded(numbers: int) -> int:
    return (numbers + 15) // 16 * 16
