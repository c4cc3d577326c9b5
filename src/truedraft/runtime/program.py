"""The compiled pass as a list of operations, and methods that append the parts common to models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from truedraft.runtime.modules import eps_of, head_norms, head_of, kv_heads, outputs_of, weight_of
from truedraft.runtime.native import Form, Op, OpKind
from truedraft.runtime.weights import (
    Copies,
    Derived,
    NotCompilable,
    Weight,
    fields,
    linear_weight,
    padded,
    pair,
    plain,
    table,
)

ACTIVATIONS = {
    "silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1, "gelu": 2, "relu": 3, "relu2": 5,
}  # fmt: skip
SIGMOID, SOFTPLUS, TABLED = 4, 6, 7
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # by kind of attention


@dataclass
class Program:
    """Operations and their buffers.

    ops: with the addresses of weights; those of keys, values and rotary tables belong to a cache and are set later.
    widths: floats in a row of each buffer, by name.
    rows: rows per node of the buffers that have several.
    parts: buffers that are the later columns of another: name -> (the other, its column).
    fed_back: the hidden state that a head continues from, numbered as in `Taps`.
    layers: for each op, the layer of the KV cache that it uses, or -1.
    copied: makes the copies that are read instead of the weights; None where these are read in place.
    outputs: the ops after which "x" is layer 0, 1, ... (`Taps`), up to the number of blocks.
    crosses: cross-attention; its key and value layers.
    biased: attention with relative position biases; the module that has them.
    states: operations with states; the size of a state, and of what a token brings to it.
    """

    narrow: bool
    layer_types: list[str]
    ops: list[Op] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    parts: dict[str, tuple[str, int]] = field(default_factory=dict)
    fed_back: int = -1
    copied: Copies | None = None
    outputs: list[int] = field(default_factory=list)
    crosses: list[tuple[Op, Any, Any]] = field(default_factory=list)  # cross-attention; its key and value layers
    biased: list[tuple[Op, Any]] = field(default_factory=list)  # with biases by distance; the attention that has them
    states: list[tuple[Op, tuple[int, ...], int]] = field(default_factory=list)
    head_from: int = 0  # the ops from here on read the gathered nodes
    tapped: bool = True  # "x" is all of a layer's hidden state
    rotary: Any = None  # what computes cosines and sines, if anything does
    rotaries: dict[int, Any] = field(default_factory=dict)  # the same of single layers
    unrotated: set[int] = field(default_factory=set)  # layers whose queries and keys are not rotated
    factor: Callable[[Tensor], Tensor] | None = None  # of the queries, by their positions; rounded
    factored: set[int] = field(default_factory=set)  # layers whose queries have it
    lean: Callable[[Tensor], Tensor] | None = None  # biases of keys, by their positions; (heads, positions)
    aside: list[Any] = field(default_factory=list)  # modules that read other things than text
    vocab_size: int = 0  # rows of the embedding
    activations: set[str] = field(default_factory=set)  # of its feed-forwards, by their names in configurations
    positions: Tensor | None = None  # that the embedding adds
    kept: list[Tensor] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)  # source, copy, offset added
    sums: torch.dtype = torch.float32  # in which offsets are added

    def op(self, kind: OpKind, layer: int = -1, wait: bool = True, **fields: Any) -> Op:
        for name in ("src", "other", "dst"):
            if name in fields:
                fields[name] = list(self.widths).index(fields[name])
        for name, size in (("src", "inner"), ("dst", "out")):
            if name in fields and fields.get(size, 0) > list(self.widths.values())[fields[name]]:
                raise NotCompilable("its layers are not of the sizes in its configuration")
        added = Op(kind=kind, wait=wait, **{"scale": 1.0, "narrow": self.narrow, **fields})
        self.ops.append(added)
        self.layers.append(layer)
        return added

    def ops_of(self, layer: int) -> range:
        """The operations of a layer: it takes the hidden state from "x", and leaves its own there."""
        return range(self.outputs[layer] + 1, self.outputs[layer + 1] + 1)

    def buffer(self, name: str, width: int, rows: int = 1) -> None:
        self.widths[name] = max(width, self.widths.get(name, 0))
        if "logits" in self.widths:
            self.widths["logits"] = self.widths.pop("logits")  # allocated per pass: the last one
        self.rows[name] = max(rows, self.rows.get(name, 0))

    def part(self, name: str, of: str, column: int, width: int = 0) -> None:
        """A name for the columns of a buffer from `column` on, all or `width` of them."""
        if column % 16:
            raise NotCompilable(f"hidden states of {column} numbers, not a multiple of sixteen")
        self.buffer(name, width or self.widths[of] - column)
        self.parts[name] = of, column

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.narrow else torch.float32

    def weight(self, layer: Any, rows: tuple[int, int] | None = None) -> Weight:
        """The weight of a linear layer, or some rows of it."""
        if type(layer) is Conv1D:  # (in, out), which only copies turn round
            whole = Weight(plain(layer.weight, self.dtype).T, None, layer.bias)
        else:
            whole = linear_weight(layer, self.dtype)
        return self.copy_of(whole.part(*rows) if rows else whole)

    def copy_of(self, weight: Weight) -> Weight:
        """The weight as operations read it."""
        return weight if self.copied is None else self.copied(weight)

    def read(self, weight: Weight) -> dict[str, Any]:
        """The fields of an operation that refer to its weight."""
        kept, given = fields(weight, self._padded)
        self.kept += kept
        return given

    def small(self, vector: Tensor | None, offset: float = 0.0) -> int | None:
        """A norm or bias as fp32, padded to sixteen."""
        if vector is None:
            return None
        return self._padded(vector, offset).data_ptr()

    def _padded(self, vector: Tensor, offset: float = 0.0) -> Tensor:
        copy = padded(vector, offset, self.sums)
        self.copies.append((vector.detach(), copy[: len(vector)], offset))
        return copy

    def copy_into(self, copy: Tensor, vector: Tensor) -> None:
        """Copy a vector of weights, now and whenever it may have been changed in place."""
        copy.copy_(vector.detach())
        self.copies.append((vector.detach(), copy, 0.0))

    def refresh(self) -> None:
        """Copy weights, norms, biases and scales again where they may have been changed in place."""
        for tensor in self.derived:
            tensor.refresh()
        if self.copied is not None:
            self.copied.refresh()
        if not self.copies:
            return
        torch._foreach_copy_([copy for _, copy, _ in self.copies], [vector for vector, _, _ in self.copies])
        for vector, copy, offset in self.copies:
            if offset:
                copy.copy_(vector.to(self.sums) + offset)

    def activation(self, name: str) -> int:
        if name not in ACTIVATIONS:
            raise NotCompilable(f"its activation is {name}")
        self.activations.add(name)
        return ACTIVATIONS[name]

    # ------------------------------------------------------------ the parts that models share

    def linear(
        self, src: str, dst: str, layer: Any, rows: tuple[int, int] | None = None, add: bool = False,
        wait: bool = True, scale: float = 1.0,
    ) -> None:  # fmt: skip
        """dst = layer(src), or dst += layer(src) with `add`; `rows` selects a part of a fused weight."""
        if type(layer) is Conv1D and self.copied is None and scale == 1.0:
            self._columns(src, dst, layer, rows or (0, layer.nf), add, wait)
            return
        self.op(
            OpKind.LINEAR, src=src, dst=dst, **self.read(self.weight(layer, rows)), mode=add, wait=wait, scale=scale
        )  # fmt: skip

    def _columns(self, src: str, dst: str, layer: Any, rows: tuple[int, int], add: bool, wait: bool) -> None:
        """A linear layer whose weight is (in, out), read in place."""
        weight, (first, last) = plain(layer.weight, self.dtype), rows
        if (last - first) % 8:
            raise NotCompilable(f"a linear layer of {last - first} outputs, not a multiple of eight")
        self.kept.append(weight)
        self.op(
            OpKind.COLUMNS, src=src, dst=dst, weight=weight[:, first:].data_ptr(), inner=len(weight), out=last - first,
            apart=weight.shape[1], form=Form.BF16 if self.narrow else Form.FLOAT, mode=add, wait=wait,
            bias=self.small(layer.bias[first:last]),
        )  # fmt: skip

    def rms_norm(self, src: str, dst: str, norm: Any, offset: float = 0.0, once: bool = False) -> None:
        weight = weight_of(norm, self.widths[src])
        self.op(
            OpKind.RMS_NORM, src=src, dst=dst, inner=len(weight), weight=self.small(weight, offset),
            eps=eps_of(norm), mode=once or offset != 0.0,
        )  # fmt: skip

    def layer_norm(self, src: str, dst: str, norm: Any, offset: float = 0.0) -> None:
        if norm.weight is None:
            raise NotCompilable("its layer norms have no weights")
        self.op(
            OpKind.LAYER_NORM, src=src, dst=dst, inner=len(norm.weight), weight=self.small(norm.weight, offset),
            bias=self.small(getattr(norm, "bias", None)), eps=eps_of(norm),
        )  # fmt: skip

    def add(self, one: str, other: str, dst: str) -> None:
        self.op(OpKind.ADD, src=one, other=other, dst=dst, inner=self.widths[dst])

    def copy(self, src: str, dst: str, scale: float = 1.0) -> None:
        self.op(OpKind.SCALE, src=src, dst=dst, inner=self.widths[dst], scale=scale)

    def copying(self, name: str, to: int) -> Op:
        """An operation beside the program's, which copies a buffer to another."""
        at = list(self.widths).index(name)
        return Op(kind=OpKind.SCALE, wait=1, src=at, other=at, dst=to, scale=1.0, inner=self.widths[name])

    def clamp(self, name: str, most: float) -> None:
        self.op(OpKind.CLAMP, src=name, dst=name, inner=self.widths[name], cap=most)

    def qkv(
        self, src: str, attention: Any, config: Any, norm: Callable[[str, str, Any], None] | None = None,
        clip: float | None = None,
    ) -> None:  # fmt: skip
        """Queries, keys and values, in "q", "k" and "v".

        norm: of all queries of a node together, and of all its keys.
        clip: the largest magnitude of their numbers.
        """
        q, kv = config.num_attention_heads * attention.head_dim, kv_heads(config) * attention.head_dim
        fused = getattr(attention, "qkv_proj", None) or getattr(attention, "c_attn", None)
        if fused is not None:
            self.linear(src, "q", fused, (0, q), wait=False)
            self.linear(src, "k", fused, (q, q + kv), wait=False)
            self.linear(src, "v", fused, (q + kv, q + 2 * kv))
        else:
            self.linear(src, "q", attention.q_proj, wait=False)
            self.linear(src, "k", attention.k_proj, wait=False)
            self.linear(src, "v", attention.v_proj)
        if norm is not None:
            norm("q", "q", attention.q_norm)
            norm("k", "k", attention.k_norm)
        if clip is not None:
            for name in ("q", "k", "v"):
                self.clamp(name, clip)

    def attend(
        self, index: int, attention: Any, config: Any, cap: float = 0.0, per_head: float | None = None,
        once: bool = False, interleaved: bool = False, scale: float | None = None, fused: str | None = None,
        norms_last: bool = False, norms_once: bool = False, gated: str | None = None, shared: bool = False,
    ) -> None:  # fmt: skip
        """Rotary embedding, cache update and attention over q, k and v; the result is in "a".

        per_head: added to the weights of the norms over each head; None where there are none.
        once: results of the rotation are rounded once.
        interleaved: adjacent numbers are rotated together, not the two halves of a head.
        fused: a buffer with q, k and v of each head side by side, instead of three buffers.
        norms_last, norms_once: the norms over each head follow the rotation; they are rounded once.
        gated: a buffer with the queries of each head before the gates of its result.
        shared: keys and values are those that the cached layer `index` has, made by another layer.
        """
        head, kind = head_of(attention), self.layer_types[index]
        if head % 8:
            raise NotCompilable(f"heads of {head} numbers, not a multiple of eight")
        sizes: dict[str, Any] = dict(
            heads=config.num_attention_heads, kv_heads=kv_heads(config), head=head,
            step=3 * head if fused else 2 * head if gated else head, kv_step=3 * head if fused else head,
        )  # fmt: skip
        norms: dict[str, Any] = {}
        if per_head is not None:
            both = head_norms(attention)
            q_norm, k_norm = (norm and self.small(weight_of(norm, head), per_head) for norm in both)
            norms = dict(
                q_norm=q_norm, k_norm=k_norm, eps=eps_of(both[0]), norm_once=norms_once or per_head != 0.0,
                norm_last=norms_last,
            )  # fmt: skip
        self.op(
            OpKind.PREPARE, index, src=fused or gated or "q", other=fused or "k", dst=fused or "v", mode=once,
            k_at=head if fused else 0, v_at=2 * head if fused else 0, interleaved=interleaved, **norms,
            **{**sizes, "kv_heads": 0 if shared else sizes["kv_heads"]},
        )  # fmt: skip
        scale = attention.scaling if scale is None else scale
        sinks = self.small(getattr(attention, "sinks", None))
        self.op(
            OpKind.ATTEND, index, src=fused or gated or "q", dst="a", scale=scale, cap=cap, sinks=sinks, **sizes,
            window=getattr(config, WINDOWS[kind]) if kind in WINDOWS else 0,
            mode=(kind == "chunked_attention") + 2 * (self.lean is not None),
        )  # fmt: skip
        if gated:
            self.gate(gated, attention, config, head, 2 * head)

    def gate(self, gates: str, attention: Any, config: Any, first: int, step: int, mode: int = SIGMOID) -> None:
        """Multiply each head of "a" by its activated gates, from column `first` on, `step` apart; where that is
        one, each head has one gate."""
        shared = dict(heads=config.num_attention_heads, head=head_of(attention))
        self.op(OpKind.GATE, src=gates, dst="a", mode=mode, k_at=first, step=step, **shared)

    def cross(self, attention: Any, config: Any, keys: Any, values: Any, *, cap: float = 0.0) -> None:
        """Attention of q over the source's keys and values, made by the layers given; the result is in "a"."""
        head = head_of(attention)
        if head % 8:
            raise NotCompilable(f"heads of {head} numbers, not a multiple of eight")
        added = self.op(
            OpKind.CROSS, src="q", dst="a", scale=attention.scaling, cap=cap, heads=config.num_attention_heads,
            kv_heads=kv_heads(config), head=head, step=head,
        )  # fmt: skip
        self.crosses.append((added, keys, values))

    def gated(self, src: str, mlp: Any, activation: str) -> None:
        """The hidden activations of a gated feed-forward, in "g"."""
        if hasattr(mlp, "gate_up_proj"):
            half = len(mlp.gate_up_proj.weight) // 2
            gate, up = self.weight(mlp.gate_up_proj, (0, half)), self.weight(mlp.gate_up_proj, (half, 2 * half))
        else:
            gate, up = self.weight(mlp.gate_proj), self.weight(mlp.up_proj)
        first, second = self.read(gate), self.read(up)
        mode = self.activation(activation)
        if any(first[name] != second[name] for name in ("form", "groups", "half", "shift")):
            self._gated_apart(src, first, second, mode)
            return
        self.op(OpKind.GATED, src=src, dst="g", **pair(first, second), mode=mode)

    def _gated_apart(self, src: str, gate: dict[str, Any], up: dict[str, Any], activation: int) -> None:
        """The same of weights in two layouts, by one operation for each step."""
        width = gate["out"]
        self.buffer("up", width)
        self.op(OpKind.LINEAR, src=src, dst="g", wait=False, **gate)
        self.op(OpKind.LINEAR, src=src, dst="up", **up)
        self.op(OpKind.ACTIVATE, src="g", dst="g", inner=width, mode=activation)
        self.op(OpKind.MULTIPLY, src="g", other="up", dst="g", inner=width)

    def activated(self, src: str, layer: Any, activation: str) -> None:
        """The hidden activations of a feed-forward without a gate, in "g"."""
        self.linear(src, "g", layer)
        self.op(OpKind.ACTIVATE, src="g", dst="g", inner=outputs_of(layer), mode=self.activation(activation))

    def xielu(self, src: str, layer: Any, activation: Any) -> None:
        """The hidden activations of a feed-forward whose activation, xIELU, has parameters; in "g"."""
        self.linear(src, "g", layer)
        self.activations.add("xielu")
        self.op(
            OpKind.XIELU, src="g", dst="g", inner=outputs_of(layer), bias=self.small(activation.alpha_p),
            other_bias=self.small(activation.alpha_n), scale=float(activation.beta), eps=float(activation.eps),
        )  # fmt: skip

    def begin(
        self, model: Any, inner: int, scale: float = 1.0, given_too: bool = False, attention: Any = None,
        rotary: Any = None, positions: Any = None, offset: int = 0,
    ) -> None:  # fmt: skip
        """Buffers, the last of them for the logits, and the embedding.

        given_too: embeddings given by the caller are scaled as well.
        attention, rotary: of the first layer, and of the model, where their attributes differ from Llama's.
        positions: a position embedding to add, indexed by position + `offset`.
        """
        c = model.config
        self.rotary = rotary or getattr(getattr(model, "model", None), "rotary_emb", None)
        head = head_of(attention or model.model.layers[0].self_attn)
        self.buffers(model, inner, c.num_attention_heads * head, kv_heads(c) * head)
        self.embed(model.get_input_embeddings(), scale, given_too)
        if positions is not None:
            self.place(plain(positions.weight, self.dtype), offset)

    def buffers(self, model: Any, inner: int, queries: int, keys: int) -> None:
        """Buffers of the model's widths.

        inner: of a feed-forward. queries, keys: of all heads of a node.
        """
        for name in ("x", "h", "t"):
            self.buffer(name, model.config.hidden_size)
        for name in ("q", "a"):
            self.buffer(name, queries)
        for name in ("k", "v"):
            self.buffer(name, keys)
        self.buffer("g", inner)
        self.buffer("logits", self.weight(model.get_output_embeddings()).shape[0])

    def embed(self, embedding: Any, scale: float = 1.0, given_too: bool = False) -> None:
        if getattr(embedding, "max_norm", None) is not None:
            raise NotCompilable("its embeddings are normalised at lookup")
        tokens = table(embedding.weight, self.dtype)
        self.kept.append(tokens.values)
        self.vocab_size, width = tokens.shape
        self.op(
            OpKind.EMBED, dst="x", weight=tokens.values.data_ptr(), form=tokens.form, inner=width, scale=scale,
            groups=0 if tokens.blocks is None else tokens.blocks.code, mode=given_too, blank=-1,
        )  # fmt: skip
        self.outputs.append(len(self.ops) - 1)

    def place(self, table: Tensor, offset: int = 0, blank: int = -1) -> None:
        """Add position embeddings from a table, indexed by position + `offset`, to all tokens but `blank`."""
        self.positions, embed = table, self.ops[0]
        embed.second, embed.shift, embed.out, embed.blank = table.data_ptr(), offset, len(table), blank

    def end(self, model: Any, norm: Callable[[str, str], None], cap: float = 0.0, scale: float = 1.0) -> None:
        """The final norm, from one buffer to another, and the output head, on the gathered nodes."""
        self.head_from = len(self.ops)
        self.op(OpKind.GATHER, src="x", dst="t", inner=model.config.hidden_size)
        norm("t", "t")
        head = self.weight(model.get_output_embeddings())
        if (bias := getattr(model, "final_logits_bias", None)) is not None:
            head = replace(head, bias=bias[0])
        self.op(OpKind.LINEAR, src="t", dst="logits", **self.read(head))
        if scale != 1.0:
            self.op(OpKind.SCALE, src="logits", dst="logits", inner=self.widths["logits"], scale=scale)
        if cap:
            self.op(OpKind.CAP, src="logits", dst="logits", inner=self.widths["logits"], cap=cap)
        for op in self.ops[self.head_from :]:
            op.tail = 1
