"""Programs of models whose states are of single channels: RecurrentGemma and RWKV."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from truedraft.runtime.native import Form, OpKind
from truedraft.runtime.program import ACTIVATIONS, SIGMOID, Program
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


def rwkv(p: Program, model: Any) -> None:
    """RWKV 4: decaying means of values, and feed-forwards, both over means of a token's input and that before it."""
    c, body = model.config, model.rwkv
    body._rescale_layers()  # divides weights in place, as the first forward does
    width = c.attention_hidden_size
    for name, numbers in (
        ("means of keys", c.hidden_size), ("means of values", c.hidden_size), ("means", c.hidden_size),
        ("key", width), ("value", width), ("receptance", max(width, c.hidden_size)), ("o", width),
    ):  # fmt: skip
        p.buffer(name, numbers)
    p.buffers(model, c.intermediate_size, 0, 0)
    p.embed(body.embeddings)
    p.layer_norm("x", "x", body.blocks[0].pre_ln)
    p.outputs.clear()  # the first hidden states of its forward are those after the first block
    for i, block in enumerate(body.blocks):
        p.layer_norm("x", "h", block.ln1)
        _mixed_times(p, "h", block.attention)
        p.linear("o", "x", block.attention.output, add=True)
        p.layer_norm("x", "h", block.ln2)
        feed = block.feed_forward
        _mean(p, "h", "means of keys", feed.time_mix_key, wait=False)
        _mean(p, "h", "means", feed.time_mix_receptance)
        p.linear("means of keys", "g", feed.key, wait=False)
        p.linear("means", "receptance", feed.receptance)
        p.op(OpKind.ACTIVATE, src="g", dst="g", inner=c.intermediate_size, mode=ACTIVATIONS["relu2"])
        p.op(OpKind.ACTIVATE, src="receptance", dst="receptance", inner=c.hidden_size, mode=SIGMOID, wait=False)
        p.linear("g", "t", feed.value)
        p.op(OpKind.MULTIPLY, src="t", other="receptance", dst="t", inner=c.hidden_size)
        p.add("x", "t", "x")
        if c.rescale_every > 0 and (i + 1) % c.rescale_every == 0:
            p.copy("x", "x", 0.5)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.ln_out))


def _mixed_times(p: Program, src: str, attention: Any) -> None:
    """Means of the values so far, weighted by exponentials of keys, times receptances, in "o"."""
    width, decay = attention.attention_hidden_size, attention.time_decay
    _mean(p, src, "means of keys", attention.time_mix_key, wait=False)
    _mean(p, src, "means of values", attention.time_mix_value, wait=False)
    _mean(p, src, "means", attention.time_mix_receptance)
    p.linear("means of keys", "key", attention.key, wait=False)
    p.linear("means of values", "value", attention.value, wait=False)
    p.linear("means", "receptance", attention.receptance)
    p.op(OpKind.ACTIVATE, src="receptance", dst="receptance", inner=width, mode=SIGMOID, wait=False)
    scan(
        p, "key", "value", "o", width, 3, mode=2, bias=p.small(attention.time_first), other_bias=p.small(decay),
        form=Form.BF16 if decay.dtype == torch.bfloat16 else Form.FLOAT,
    )  # fmt: skip
    p.op(OpKind.MULTIPLY, src="o", other="receptance", dst="o", inner=width)


def _mean(p: Program, src: str, dst: str, weights: Any, wait: bool = True) -> None:
    """The mean of a token's input and that of the token before, with so much of the former in each channel."""
    channels = weights.numel()
    if channels % 8:
        raise NotCompilable(f"{channels} channels, not a multiple of eight")
    rows = torch.zeros(2, padded_to_16(channels))
    p.kept.append(rows)
    p.copy_into(rows[1, :channels], weights.view(-1))
    op = p.op(OpKind.CONVOLVE, src=src, dst=dst, inner=channels, head=2, weight=rows.data_ptr(), mode=-2, wait=wait)
    p.states.append((op, (1, padded_to_16(channels)), padded_to_16(channels)))


SCANS: dict[str, Callable[[Program, Any], None]] = {"recurrent_gemma": recurrent_gemma, "rwkv": rwkv}
