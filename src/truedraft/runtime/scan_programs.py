"""Programs of models whose states are of single channels: RecurrentGemma."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from truedraft.runtime.native import Form, OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.state_programs import convolve
from truedraft.runtime.weights import NotCompilable, padded_to_16, plain


def recurrent_gemma(p: Program, model: Any) -> None:
    """RecurrentGemma: convolutions and gated linear recurrent units, or attention with a sliding window, and then a
    feed-forward."""
    c, body = model.config, model.model
    norm = partial(p.rms_norm, offset=1.0)
    mixed = [layer.temporal_block for layer in body.layers]
    attention = next((block for block in mixed if hasattr(block, "q_proj")), None)
    if attention is None:
        raise NotCompilable("none of its layers attends")
    width = c.lru_width
    for name, numbers in (("y", width), ("mixed", width), ("convolved", width), ("o", width)):
        p.buffer(name, numbers)
    for name, part in (("gates", "kept gates"), ("brought", "kept")):
        p.buffer(name, 2 * width)
        p.part(part, name, width)
    scale = body.normalizer.to(model.dtype).item()
    p.begin(model, c.intermediate_size // 2, scale, True, attention, attention.rotary_emb)
    count = 0
    for layer, block in zip(body.layers, mixed, strict=True):
        norm("x", "h", layer.temporal_pre_norm)
        if hasattr(block, "q_proj"):
            p.qkv("h", block, c)
            p.attend(count, block, c)
            p.linear("a", "x", block.o_proj, add=True)
            count += 1
        else:
            _unit(p, "h", block, c.hidden_activation)
            p.linear("o", "x", block.linear_out, add=True)
        norm("x", "h", layer.channel_pre_norm)
        p.gated("h", layer.mlp_block, c.hidden_activation)
        p.linear("g", "x", layer.mlp_block.down_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: norm(src, dst, body.final_norm), c.logits_soft_cap)


def _unit(p: Program, src: str, block: Any, activation: str) -> None:
    """A gated linear recurrent unit over a convolution, times a branch beside it, in "o"."""
    unit, width = block.rg_lru, block.lru_width
    heads, size = unit.num_attention_heads, unit.block_width
    if size % 8 or heads * size != width:
        raise NotCompilable(f"{heads} heads of {size} channels, not a multiple of eight, or not {width} in all")
    p.linear(src, "y", block.linear_y, wait=False)
    p.linear(src, "mixed", block.linear_x)
    p.op(OpKind.ACTIVATE, src="y", dst="y", inner=width, mode=p.activation(activation), wait=False)
    convolve(p, "mixed", "convolved", block.conv_1d, -1)
    for name, factors in (("gates", unit.input_gate_weight), ("kept gates", unit.recurrent_gate_weight)):
        rows = plain(factors, p.dtype)
        p.kept.append(rows)
        p.op(
            OpKind.HEADS, src="convolved", dst=name, heads=heads, weight=rows.data_ptr(), inner=size, out=size,
            form=Form.BF16 if p.narrow else Form.FLOAT, apart=size, step=size, kv_step=size, mode=True,
            wait=name != "gates",
        )  # fmt: skip
    p.op(
        OpKind.UNIT, src="convolved", other="gates", dst="brought", inner=width, k_at=width, v_at=width,
        weight=p.small(unit.recurrent_param), bias=p.small(unit.input_gate_bias.view(-1)),
        other_bias=p.small(unit.recurrent_gate_bias.view(-1)),
    )  # fmt: skip
    scan(p, "brought", "kept", "o", width, 1, mode=1)
    p.op(OpKind.MULTIPLY, src="o", other="y", dst="o", inner=width)


def scan(p: Program, src: str, other: str, dst: str, channels: int, numbers: int, **fields: Any) -> None:
    """A recurrence of channels by themselves, each with so many numbers as its state."""
    op = p.op(OpKind.SCAN, src=src, other=other, dst=dst, inner=channels, heads=1, head=numbers, **fields)
    p.states.append((op, (numbers, padded_to_16(channels)), 2 * padded_to_16(channels)))


SCANS: dict[str, Callable[[Program, Any], None]] = {"recurrent_gemma": recurrent_gemma}
