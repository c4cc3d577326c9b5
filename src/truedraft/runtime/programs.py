"""Models as lists of operations for the compiled pass: one short function per architecture.

A program is made from the modules of a `transformers` model and points into their weights; nothing is copied but
norms, biases and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs

from truedraft.runtime.native import Kind, Op
from truedraft.runtime.weights import Unsuited, Weight, fields, linear_weight, padded, plain

Norm = Callable[[str, str, Any], None]
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1, "gelu": 2, "relu": 3}


@dataclass
class Program:
    """Operations and the buffers that they work on.

    ops: with addresses of weights filled in; those of keys, values and rotary tables belong to a cache and follow.
    widths: floats per node of each buffer, by name.
    layers: for each op, the layer whose cache it uses, or -1.
    outputs: the op after which a hidden state stands in "x", as in `output_hidden_states`, the last one excepted.
    """

    narrow: bool
    layer_types: list[str]
    ops: list[Op] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    head_from: int = 0  # the ops from here on read the gathered nodes
    kept: list[Tensor] = field(default_factory=list)

    def op(self, kind: Kind, layer: int = -1, wait: bool = True, **fields: Any) -> Op:
        for name in ("src", "other", "dst"):
            if name in fields:
                fields[name] = list(self.widths).index(fields[name])
        for name, size in (("src", "inner"), ("dst", "out")):
            if name in fields and fields.get(size, 0) > list(self.widths.values())[fields[name]]:
                raise Unsuited("its layers are not of the sizes that its configuration says")
        made = Op(kind=kind, wait=wait, narrow=self.narrow, **{"scale": 1.0, **fields})
        self.ops.append(made)
        self.layers.append(layer)
        return made

    def buffer(self, name: str, width: int) -> None:
        self.widths[name] = max(width, self.widths.get(name, 0))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.narrow else torch.float32

    def weight(self, layer: Any, rows: tuple[int, int] | None = None) -> Weight:
        """The weight of a linear layer, or some rows of it."""
        whole = linear_weight(layer, self.dtype)
        return whole.part(*rows) if rows else whole

    def read(self, weight: Weight) -> dict[str, Any]:
        """The fields of an operation that say where its weight lies."""
        kept, given = fields(weight)
        self.kept += kept
        return given

    def small(self, vector: Tensor | None, offset: float = 0.0) -> int | None:
        """A norm or bias as fp32, padded to sixteen."""
        if vector is None:
            return None
        self.kept.append(padded(vector, offset))
        return self.kept[-1].data_ptr()

    # ------------------------------------------------------------ the parts that models share

    def linear(
        self,
        src: str,
        dst: str,
        layer: Any,
        rows: tuple[int, int] | None = None,
        add: bool = False,
        wait: bool = True,
        scale: float = 1.0,
    ) -> None:
        """dst = layer(src), or dst += it; `rows` takes a part of a fused weight."""
        self.op(
            Kind.LINEAR, src=src, dst=dst, **self.read(self.weight(layer, rows)), mode=add, wait=wait, scale=scale
        )  # fmt: skip

    def rms_norm(self, src: str, dst: str, norm: Any, offset: float = 0.0, once: bool = False) -> None:
        weight = norm.weight
        self.op(
            Kind.RMS_NORM, src=src, dst=dst, inner=len(weight), weight=self.small(weight, offset),
            eps=_eps(norm), mode=once or offset != 0.0,
        )  # fmt: skip

    def layer_norm(self, src: str, dst: str, norm: Any) -> None:
        if norm.weight is None:
            raise Unsuited("its layer norms have no weights")
        self.op(
            Kind.LAYER_NORM, src=src, dst=dst, inner=len(norm.weight), weight=self.small(norm.weight),
            bias=self.small(norm.bias), eps=norm.eps,
        )  # fmt: skip

    def add(self, one: str, other: str, dst: str) -> None:
        self.op(Kind.ADD, src=one, other=other, dst=dst, inner=self.widths[dst])

    def qkv(self, src: str, attention: Any, config: Any) -> None:
        q, kv = config.num_attention_heads * attention.head_dim, config.num_key_value_heads * attention.head_dim
        if fused := getattr(attention, "qkv_proj", None):
            self.linear(src, "q", fused, (0, q), wait=False)
            self.linear(src, "k", fused, (q, q + kv), wait=False)
            self.linear(src, "v", fused, (q + kv, q + 2 * kv))
        else:
            self.linear(src, "q", attention.q_proj, wait=False)
            self.linear(src, "k", attention.k_proj, wait=False)
            self.linear(src, "v", attention.v_proj)

    def attend(
        self, index: int, attention: Any, config: Any, cap: float = 0.0, per_head: float | None = None,
        once: bool = False,
    ) -> None:  # fmt: skip
        """Rotation, cache and attention over q, k and v; the result is in "a".

        per_head: the offset of the weights of norms over each head, None where there are none.
        """
        head = attention.head_dim
        if head % 8:
            raise Unsuited(f"heads of {head} numbers, not a multiple of eight")
        shared: dict[str, Any] = dict(
            heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head=head,
            window=config.sliding_window if self.layer_types[index] == "sliding_attention" else 0,
        )  # fmt: skip
        norms: dict[str, Any] = {}
        if per_head is not None:
            q_norm, k_norm = (self.small(norm.weight, per_head) for norm in (attention.q_norm, attention.k_norm))
            norms = dict(q_norm=q_norm, k_norm=k_norm, eps=_eps(attention.q_norm), norm_once=per_head != 0.0)
        self.op(Kind.PREPARE, index, src="q", other="k", dst="v", mode=once, **shared, **norms)
        self.op(Kind.ATTEND, index, src="q", dst="a", scale=attention.scaling, cap=cap, **shared)

    def gated(self, src: str, mlp: Any, activation: str) -> None:
        """The hidden numbers of a gated feed-forward, in "g"."""
        if activation not in ACTIVATIONS:
            raise Unsuited(f"its activation is {activation}")
        if hasattr(mlp, "gate_up_proj"):
            half = len(mlp.gate_up_proj.weight) // 2
            gate, up = self.weight(mlp.gate_up_proj, (0, half)), self.weight(mlp.gate_up_proj, (half, 2 * half))
        else:
            gate, up = self.weight(mlp.gate_proj), self.weight(mlp.up_proj)
        if (gate.form, gate.group) != (up.form, up.group):
            raise Unsuited("the weights of one feed-forward are kept in two ways")
        second = self.read(up)
        self.op(
            Kind.GATED, src=src, dst="g", **self.read(gate), second=second["weight"], second_scales=second["scales"],
            other_bias=second["bias"], mode=ACTIVATIONS[activation],
        )  # fmt: skip

    def gate(self, activation: str) -> Callable[[Any], Any]:
        """A gated feed-forward from "h", as `pre_norm` takes it."""

        def feed(mlp: Any) -> Any:
            self.gated("h", mlp, activation)
            return mlp.down_proj

        return feed

    def activated(self, src: str, layer: Any, activation: str) -> None:
        """The hidden numbers of a feed-forward without a gate, in "g"."""
        if activation not in ACTIVATIONS:
            raise Unsuited(f"its activation is {activation}")
        self.linear(src, "g", layer)
        self.op(Kind.ACTIVATE, src="g", dst="g", inner=layer.out_features, mode=ACTIVATIONS[activation])

    def begin(self, model: Any, inner: int, scale: float = 1.0, given_too: bool = False) -> None:
        """Buffers and the embedding; `given_too` where embeddings given by the caller are scaled as well."""
        c, embedding = model.config, model.get_input_embeddings()
        head = model.model.layers[0].self_attn.head_dim
        for name in ("x", "h", "t"):
            self.buffer(name, c.hidden_size)
        for name in ("q", "a"):
            self.buffer(name, c.num_attention_heads * head)
        for name in ("k", "v"):
            self.buffer(name, c.num_key_value_heads * head)
        self.buffer("g", inner)
        self.buffer("logits", len(self.weight(model.get_output_embeddings()).values))
        table = plain(embedding.weight, self.dtype)
        self.kept.append(table)
        self.op(
            Kind.EMBED, dst="x", weight=table.data_ptr(), inner=c.hidden_size, scale=scale, mode=given_too
        )  # fmt: skip
        self.outputs.append(len(self.ops) - 1)

    def end(
        self, model: Any, norm: Callable[[str, str], None], cap: float = 0.0, divisor: float = 1.0
    ) -> None:  # fmt: skip
        """The last norm, from one buffer to another, and the head, on the gathered nodes."""
        self.head_from = len(self.ops)
        self.op(Kind.GATHER, src="x", dst="t", inner=model.config.hidden_size)
        norm("t", "t")
        self.linear("t", "logits", model.get_output_embeddings())
        if divisor != 1.0:
            self.op(Kind.SCALE, src="logits", dst="logits", inner=self.widths["logits"], scale=1.0 / divisor)
        if cap:
            self.op(Kind.CAP, src="logits", dst="logits", inner=self.widths["logits"], cap=cap)
        for op in self.ops[self.head_from :]:
            op.tail = 1


def strangers(model: Any) -> list[str]:
    """Modules whose forward is not all that they do; what transformers hooks in to record outputs is not counted."""

    def foreign(hooks: Iterable[Callable]) -> bool:
        return any(not getattr(h, "__module__", "").startswith("transformers.utils.output_capturing") for h in hooks)

    return [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module._forward_pre_hooks or foreign(module._forward_hooks.values()) or "forward" in vars(module)
    ]


def _eps(norm: Any) -> float:
    return getattr(norm, "variance_epsilon", None) or norm.eps


# ---------------------------------------------------------------- architectures


def pre_norm(
    p: Program, model: Any, norm: Norm, feed: Callable[[Any], Any], per_head: float | None = None, scale: float = 1.0
) -> None:  # fmt: skip
    """Blocks with a norm before attention and a norm before the feed-forward, each added to the residual.

    feed: writes the hidden numbers of a layer's feed-forward from "h" to "g", and returns the linear layer behind them.
    scale: of what a block adds.
    """
    c = model.config
    for i, layer in enumerate(model.model.layers):
        norm("x", "h", layer.input_layernorm)
        p.qkv("h", layer.self_attn, c)
        p.attend(i, layer.self_attn, c, per_head=per_head)
        p.linear("a", "x", layer.self_attn.o_proj, add=True, scale=scale)
        norm("x", "h", layer.post_attention_layernorm)
        down = feed(layer.mlp)
        p.linear("g", "x", down, add=True, scale=scale)
        p.outputs.append(len(p.ops) - 1)


def llama(p: Program, model: Any) -> None:
    """Llama, Mistral, Qwen 2, Phi 3; with norms over each head, Qwen 3."""
    c = model.config
    p.begin(model, c.intermediate_size)
    pre_norm(p, model, p.rms_norm, p.gate(c.hidden_act), per_head=0.0 if c.model_type == "qwen3" else None)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm))


def gemma(p: Program, model: Any) -> None:
    """Gemma 2 and 3: norms on both sides of every block, weights of norms counted from one, capped scores."""
    c = model.config
    scale = model.get_input_embeddings().embed_scale.to(model.dtype).item()
    p.begin(model, c.intermediate_size, scale)
    for i, layer in enumerate(model.model.layers):
        p.rms_norm("x", "h", layer.input_layernorm, 1.0)
        p.qkv("h", layer.self_attn, c)
        cap = getattr(layer.self_attn, "attn_logit_softcapping", None) or 0.0
        p.attend(i, layer.self_attn, c, cap, per_head=1.0 if c.model_type == "gemma3_text" else None)
        p.linear("a", "h", layer.self_attn.o_proj)
        p.rms_norm("h", "h", layer.post_attention_layernorm, 1.0)
        p.add("x", "h", "x")
        p.rms_norm("x", "h", layer.pre_feedforward_layernorm, 1.0)
        p.gated("h", layer.mlp, c.hidden_activation)
        p.linear("g", "h", layer.mlp.down_proj)
        p.rms_norm("h", "h", layer.post_feedforward_layernorm, 1.0)
        p.add("x", "h", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm, 1.0), c.final_logit_softcapping or 0.0)


def olmo2(p: Program, model: Any) -> None:
    """OLMo 2: norms behind the blocks, and over all queries and keys together."""
    c = model.config
    p.begin(model, c.intermediate_size)
    for i, layer in enumerate(model.model.layers):
        p.qkv("x", layer.self_attn, c)
        p.rms_norm("q", "q", layer.self_attn.q_norm, once=True)
        p.rms_norm("k", "k", layer.self_attn.k_norm, once=True)
        p.attend(i, layer.self_attn, c, once=True)
        p.linear("a", "h", layer.self_attn.o_proj)
        p.rms_norm("h", "h", layer.post_attention_layernorm, once=True)
        p.add("x", "h", "x")
        p.gated("x", layer.mlp, c.hidden_act)
        p.linear("g", "h", layer.mlp.down_proj)
        p.rms_norm("h", "h", layer.post_feedforward_layernorm, once=True)
        p.add("x", "h", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm, once=True))


def granite(p: Program, model: Any) -> None:
    """Granite: Llama with a factor on embeddings, blocks and logits."""
    c = model.config
    p.begin(model, c.intermediate_size, c.embedding_multiplier, given_too=True)
    pre_norm(p, model, p.rms_norm, p.gate(c.hidden_act), scale=c.residual_multiplier)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm), divisor=c.logits_scaling)


def starcoder2(p: Program, model: Any) -> None:
    """StarCoder 2: layer norms, biases, a feed-forward without a gate."""
    c = model.config

    def feed(mlp: Any) -> Any:
        p.activated("h", mlp.c_fc, c.hidden_act)
        return mlp.c_proj

    p.begin(model, c.intermediate_size)
    pre_norm(p, model, p.layer_norm, feed)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, model.model.norm))


def stablelm(p: Program, model: Any) -> None:
    """StableLM: Llama with layer norms and part of each head rotated."""
    c = model.config
    if c.qk_layernorm or c.use_parallel_residual:
        raise Unsuited("its queries and keys are normed, or its blocks are parallel")
    p.begin(model, c.intermediate_size)
    pre_norm(p, model, p.layer_norm, p.gate(c.hidden_act))
    p.end(model, lambda src, dst: p.layer_norm(src, dst, model.model.norm))


def phi(p: Program, model: Any) -> None:
    """Phi 1 and 2: attention and feed-forward side by side behind one norm."""
    c = model.config
    if c.qk_layernorm:
        raise Unsuited("its queries and keys are normed")
    p.begin(model, c.intermediate_size)
    for i, layer in enumerate(model.model.layers):
        p.layer_norm("x", "h", layer.input_layernorm)
        p.qkv("h", layer.self_attn, c)
        p.attend(i, layer.self_attn, c)
        p.linear("a", "t", layer.self_attn.dense)
        p.activated("h", layer.mlp.fc1, c.hidden_act)
        p.linear("g", "h", layer.mlp.fc2)
        p.add("t", "h", "h")
        p.add("h", "x", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, model.model.final_layernorm))


PROGRAMS: dict[str, Callable[[Program, Any], None]] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "phi3": llama,
    "gemma2": gemma,
    "gemma3_text": gemma,
    "olmo2": olmo2,
    "granite": granite,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "phi": phi,
}


def compile_program(model: Any) -> Program:
    """Raises Unsuited, with the reason, where the compiled pass cannot stand in for the model's forward."""
    make = PROGRAMS.get(model.config.model_type)
    if make is None:
        raise Unsuited(f"there is no program for {model.config.model_type} models")
    if not type(model).__module__.startswith("transformers.models."):
        raise Unsuited(f"{type(model).__name__} is not a class of transformers")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise Unsuited(f"{model.dtype} is neither float32 nor bfloat16")
    if found := strangers(model):
        raise Unsuited(f"hooks or replaced forwards would not be run ({', '.join(found)})")
    program = Program(model.dtype == torch.bfloat16, get_layer_types_and_kwargs(model.config)[0])
    try:
        make(program, model)
    except (AttributeError, TypeError) as missing:
        raise Unsuited(f"its modules are not those of a {model.config.model_type} model: {missing}") from missing
    return program
