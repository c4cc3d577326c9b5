"""Layers of Mamba, of both kinds, but for their last projections: from a hidden state to "o"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from truedraft.runtime.modules import eps_of
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import ACTIVATIONS, Program
from truedraft.runtime.state_programs import convolve
from truedraft.runtime.weights import NotCompilable, Weight, linear_weight, padded_to_16, plain

# Some models lengthen time steps to a least one in passes of several tokens, and not in those of one. The compiled pass
# follows the latter throughout; a longer least step than this is refused.
LEAST_STEP = 1e-3
SLICE = 32  # channels that a scan advances together, as in native/scans.inc


def reserve(p: Program, layer: Any) -> None:
    """Buffers for `mixer`."""
    values, first = layer.intermediate_size, not hasattr(layer, "num_heads")
    channels = values if first else layer.conv_dim
    for name, numbers in (("mixed", channels), ("convolved", channels), ("z", values), ("o", values)):
        p.buffer(name, numbers)
    if not first:
        p.buffer("steps", layer.num_heads)
        p.buffer("rates", 2 * layer.num_heads)
        return
    heads, size = getattr(layer, "n_mamba_heads", 1), layer.ssm_state_size
    p.buffer("steps", layer.time_step_rank)
    p.buffer("selected", values + 2 * padded_to_16(heads * size))
    for h in range(heads):
        for name, of, column in (
            ("convolved", "convolved", h * values // heads), ("steps", "selected", h * values // heads),
            ("keys", "selected", values + h * size),
            ("queries", "selected", values + padded_to_16(heads * size) + h * size),
        ):  # fmt: skip
            p.part(f"{name} of head {h}", of, column)
    if hasattr(layer, "n_mamba_heads"):
        p.buffer("interleaved", 2 * values)


def mixer(p: Program, src: str, layer: Any, factors: Sequence[float] = (1.0,) * 5) -> None:
    """A layer of Mamba but for its last projection; the result, gated and normalised, is in "o".

    factors: of the gates, values, keys, queries and time steps of Mamba 2, as they are projected.
    """
    if hasattr(layer, "num_heads"):
        _dual(p, src, layer, factors)
    else:
        _selective(p, src, layer)


def _dual(p: Program, src: str, layer: Any, factors: Sequence[float]) -> None:
    """Mamba 2: a matrix of each head decays and takes up the outer product of a key and a value."""
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


def _selective(p: Program, src: str, layer: Any) -> None:
    """Mamba 1: the numbers of each channel's state decay at rates of their own, and take up the channel's input times a
    key that all channels share; with heads, those of a head."""
    heads, size, values = getattr(layer, "n_mamba_heads", 1), layer.ssm_state_size, layer.intermediate_size
    width, keys = values // heads, padded_to_16(heads * size)
    if width % 8:
        raise NotCompilable(f"{width} channels, not a multiple of eight")
    if hasattr(layer, "n_mamba_heads"):  # inputs and gates are neighbours
        p.linear(src, "interleaved", layer.in_proj)
        for at, name in enumerate(("mixed", "z")):
            p.op(OpKind.PICK, src="interleaved", dst=name, heads=values, head=1, step=2, k_at=at, wait=at == 1)
    else:
        p.linear(src, "mixed", layer.in_proj, (0, values), wait=False)
        p.linear(src, "z", layer.in_proj, (values, 2 * values))
    convolve(p, "mixed", "convolved", layer.conv1d, p.activation(layer.activation))
    for h in range(heads):
        _selected(p, layer, h)
    rates = torch.zeros(size, padded_to_16(values))
    p.kept.append(rates)
    p.copy_into(rates[:, :values], layer.A_log.view(values, size).T)
    bias = layer.dt_proj_bias.view(-1) if hasattr(layer, "dt_proj_bias") else layer.dt_proj.bias
    op = p.op(
        OpKind.SCAN, src="convolved", other="selected", dst="o", inner=values, heads=heads, head=size, k_at=values,
        q_at=values + keys, weight=rates.data_ptr(), bias=p.small(bias), other_bias=p.small(layer.D.view(-1)),
    )  # fmt: skip
    slices = heads * math.ceil(width / SLICE)
    p.states.append((op, (size, padded_to_16(values)), 2 * padded_to_16(values) + padded_to_16(slices * size)))
    p.op(OpKind.ACTIVATE, src="z", dst="z", inner=values, mode=ACTIVATIONS["silu"])
    p.op(OpKind.MULTIPLY, src="o", other="z", dst="o", inner=values)


def _selected(p: Program, layer: Any, h: int) -> None:
    """Time steps, without their bias, keys and queries of a head, in its parts of "selected"."""
    size, at = layer.ssm_state_size, 0
    if hasattr(layer, "x_proj"):
        first, last = linear_weight(layer.x_proj, p.dtype), linear_weight(layer.dt_proj, p.dtype)
    else:
        first, last = (Weight(plain(w[h], p.dtype), None, None) for w in (layer.x_proj_weight, layer.dt_proj_weight))
    parts = (
        ("steps", "dt_layernorm", layer.time_step_rank), (f"keys of head {h}", "b_layernorm", size),
        (f"queries of head {h}", "c_layernorm", size),
    )  # fmt: skip
    for name, _, numbers in parts:
        read = p.read(p.copy_of(first.part(at, at + numbers)))
        p.op(OpKind.LINEAR, src=f"convolved of head {h}", dst=name, **read, wait=name.startswith("queries"))
        at += numbers
    for name, attribute, numbers in parts:
        norm = getattr(layer, attribute, None)
        if norm is not None:  # those of Falcon Mamba have a weight that their forward does not read
            weight = norm.weight if isinstance(norm.weight, nn.Parameter) else torch.ones(numbers)
            p.op(
                OpKind.RMS_NORM, src=name, dst=name, inner=numbers, weight=p.small(weight), eps=eps_of(norm),
                wait=name.startswith("queries"),
            )  # fmt: skip
    p.op(
        OpKind.LINEAR, src="steps", dst=f"steps of head {h}", **p.read(p.copy_of(replace(last, bias=None)))
    )  # fmt: skip
