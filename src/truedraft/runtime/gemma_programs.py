"""Programs of Gemma 4, whose layers differ in size, may share keys and values, and read embeddings of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime import mixtures
from truedraft.runtime.blocks import AROUND, blocks, final, gate
from truedraft.runtime.modules import eps_of
from truedraft.runtime.native import OpKind
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable, plain


def gemma4(p: Program, model: Any) -> None:
    """Gemma 4: norms around every block, and over heads of values too; full attention has heads of another size, and
    may have values made of the keys; a factor on each layer.

    The last layers may read the keys and values of earlier ones. Each layer may have an embedding of every token, and a
    mixture of experts beside its feed-forward.
    """
    c, layers = model.config, model.model.layers
    if c.use_bidirectional_attention == "all":
        raise NotCompilable("its tokens attend to later ones")
    sizes, of, by_layer = list(c.per_layer_config), sources(c), getattr(c, "hidden_size_per_layer_input", 0)
    norm = partial(p.rms_norm, once=True)
    for layer, size in zip(layers, sizes, strict=True):
        _reserve(p, layer, size, c)
    if by_layer:
        reserve_by_layer(p, c)
    p.rotary = model.model.rotary_emb
    p.buffers(model, 0, 0, 0)
    p.embed(model.get_input_embeddings(), embedding_scale(model.get_input_embeddings(), p))
    if by_layer:
        if len(model.model.embed_tokens_per_layer.weight) < p.vocab_size:
            raise NotCompilable("its layers have embeddings of fewer tokens than it reads")
        embed_by_layer(p, model)

    def mixed(src: str, index: int, attention: Any) -> str:
        attend(p, src, of[index], attention, sizes[index])
        return "a"

    dense = gate(p, c.hidden_activation)

    def feed(src: str, layer: Any) -> Any:
        last = dense(src, layer)
        if not getattr(layer, "enable_moe_block", False):
            return last
        p.linear("g", "t", last)
        norm("t", "beside", layer.post_feedforward_layernorm_1)
        _experts(p, layer, c)
        norm("t", "t", layer.post_feedforward_layernorm_2)
        p.add("beside", "t", "t")
        return None

    def after(index: int, layer: Any) -> None:
        if by_layer:
            read_own_embedding(p, "x", layer, index, c.hidden_activation)
            norm("t", "t", layer.post_per_layer_input_norm)
            p.add("x", "t", "x")
        p.op(OpKind.SCALE, src="x", dst="x", inner=c.hidden_size, bias=p.small(layer.layer_scalar))

    blocks(p, model, norm, feed, AROUND, mixed=mixed, after=after)
    final(p, model, norm, c.final_logit_softcapping or 0.0)


def sources(config: Any) -> list[int]:
    """The layer whose keys and values each layer reads: its own, or the last of its kind that has any."""
    found: dict[str, int] = {}
    layers = []
    for i, (kind, mode) in enumerate(zip(config.layer_types, config.kv_sharing_modes, strict=True)):
        if mode != "reuse":
            found[kind] = i
        layers.append(found[kind])
    return layers


def embedding_scale(embedding: Any, p: Program) -> float:
    """The factor of embeddings, in the model's dtype."""
    return rounded(embedding.embed_scale, p)


def rounded(factor: Any, p: Program) -> float:
    """A factor; where it is a tensor, in the model's dtype."""
    return float(factor.to(p.dtype).item()) if isinstance(factor, Tensor) else factor


def norm_by_part(p: Program, name: str, norm: Any, parts: int, width: int) -> None:
    """The norm of each part of a row by itself, rounded once."""
    weight = norm.weight if norm.with_scale else torch.ones(width)
    p.op(
        OpKind.RMS_NORM, src=name, dst=name, heads=parts, inner=width, weight=p.small(weight), eps=eps_of(norm), mode=1
    )


def _reserve(p: Program, layer: Any, size: Any, c: Any) -> None:
    """Buffers of a layer's sizes."""
    attention = layer.self_attn
    for name, heads in (("q", "num_attention_heads"), ("a", "num_attention_heads"), ("k", "num_key_value_heads"),
                        ("v", "num_key_value_heads")):  # fmt: skip
        p.buffer(name, getattr(size, heads) * attention.head_dim)
    p.buffer("g", layer.mlp.down_proj.in_features)
    if getattr(layer, "enable_moe_block", False):
        p.buffer("beside", c.hidden_size)
        mixtures.reserve(p, [_mixture(layer, c)])


def reserve_by_layer(p: Program, c: Any) -> None:
    """Buffers for the embeddings of layers."""
    width, count = c.hidden_size_per_layer_input, c.num_hidden_layers
    p.buffer("own", width)
    for name in ("projected", "by_layer"):
        p.buffer(name, width * count)
    for i in range(count):
        p.part(f"by_layer {i}", "by_layer", i * width)


def _mixture(layer: Any, c: Any) -> Any:
    """The mixture of experts of a layer by the names of others."""
    router = SimpleNamespace(weight=layer.router.proj.weight, top_k=c.top_k_experts)
    return SimpleNamespace(gate=router, experts=layer.experts)


def _experts(p: Program, layer: Any, c: Any) -> None:
    """The mixture beside a layer's feed-forward; it reads "x", the result is in "t"."""
    router = layer.router
    p.rms_norm("x", "t", SimpleNamespace(weight=router.scale, eps=router.eps))
    p.copy("t", "t", router.scalar_root_size)
    p.rms_norm("x", "h", layer.pre_feedforward_layernorm_2, once=True)
    factors = p.small(router.per_expert_scale)
    mixtures.routed(p, "h", _mixture(layer, c), c.hidden_activation, True, judged="t", mode=1, other_bias=factors)


def embed_by_layer(p: Program, model: Any) -> None:
    """The embeddings of a token for each layer, to which a projection of its own embedding is added; in "by_layer"."""
    c, body = model.config, model.model
    width, count, table = c.hidden_size_per_layer_input, c.num_hidden_layers, body.embed_tokens_per_layer
    rows = plain(table.weight, p.dtype)
    p.kept.append(rows)
    p.op(
        OpKind.EMBED, dst="by_layer", weight=rows.data_ptr(), inner=width * count, scale=embedding_scale(table, p),
        blank=-1, wait=False, heads=len(rows) if len(rows) < p.vocab_size else 0,
    )  # fmt: skip
    factor = getattr(body, "per_layer_model_projection_scale", None)
    projected = body.per_layer_projection_scale if factor is None else factor
    p.linear("x", "projected", body.per_layer_model_projection, scale=rounded(projected, p))
    norm_by_part(p, "projected", body.per_layer_projection_norm, count, width)
    p.add("projected", "by_layer", "by_layer")
    p.copy("by_layer", "by_layer", rounded(body.per_layer_input_scale, p))
    p.outputs = [len(p.ops) - 1]


def read_own_embedding(p: Program, src: str, layer: Any, index: int, activation: str) -> None:
    """What a layer makes of its own embedding of a token, gated by the hidden state; in "t"."""
    width = layer.per_layer_input_gate.out_features
    p.linear(src, "own", layer.per_layer_input_gate)
    p.op(OpKind.ACTIVATE, src="own", dst="own", inner=width, mode=p.activation(activation))
    p.op(OpKind.MULTIPLY, src="own", other=f"by_layer {index}", dst="own", inner=width)
    p.linear("own", "t", layer.per_layer_projection)


def attend(p: Program, src: str, source: int, attention: Any, size: Any) -> None:
    """Attention with norms over heads of queries, keys and values, of which the last two may be another layer's."""
    shared = attention.is_kv_shared_layer
    p.linear(src, "q", attention.q_proj, wait=shared)
    if not shared:
        values = getattr(attention, "v_proj", None)
        p.linear(src, "k", attention.k_proj, wait=values is None)
        if values is None:
            p.copy("k", "v")
        else:
            p.linear(src, "v", values)
        norm_by_part(p, "v", attention.v_norm, size.num_key_value_heads, attention.head_dim)
    p.attend(source, attention, size, per_head=0.0, norms_once=True, shared=shared)


GEMMA: dict[str, Callable[[Program, Any], None]] = {"gemma4_text": gemma4, "gemma4_unified_text": gemma4}
