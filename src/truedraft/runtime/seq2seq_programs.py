"""Encoder-decoders as lists of operations for the compiled passes: one function per family, for either stack.

See `programs.py`; a decoder's nodes also attend to the encoder's output, whose keys and values are cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from truedraft.errors import Refused
from truedraft.runtime.modules import kv_heads
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable

NORMED_BEFORE = ("mbart", "pegasus", "blenderbot", "m2m_100")  # pre-norm; the others of the BART family are post-norm


def bart(p: Program, model: Any, encoder: bool = False) -> None:
    """BART, mBART, PLBart, Marian, Pegasus, Blenderbot, M2M100 (NLLB): the decoder, or the encoder."""
    c, body = model.config, model.get_encoder() if encoder else model.get_decoder()
    before = c.model_type in NORMED_BEFORE
    count, inner = c.decoder_attention_heads, c.decoder_ffn_dim
    if encoder:
        count, inner = c.encoder_attention_heads, c.encoder_ffn_dim
    heads = SimpleNamespace(num_attention_heads=count, sliding_window=None)

    def enter(norm: Any) -> str:
        if before:
            p.layer_norm("x", "h", norm)
        return "h" if before else "x"

    def leave(src: str, layer: Any, norm: Any) -> None:
        p.linear(src, "x", layer, add=True)
        if not before:
            p.layer_norm("x", "x", norm)

    p.buffers(model, inner, c.d_model, c.d_model)
    scaled = body if hasattr(body, "embed_scale") else body.embed_tokens
    p.embed(body.embed_tokens, getattr(scaled, "embed_scale", 1.0))
    if hasattr(body, "layernorm_embedding"):
        p.layer_norm("x", "x", body.layernorm_embedding)
        p.outputs[-1] += 1
    for i, layer in enumerate(body.layers):
        own = layer.self_attn
        p.qkv(enter(layer.self_attn_layer_norm), own, heads)
        p.attend(i, own, heads)
        leave("a", own.out_proj, layer.self_attn_layer_norm)
        if not encoder:
            cross = layer.encoder_attn
            p.linear(enter(layer.encoder_attn_layer_norm), "q", cross.q_proj)
            p.cross(cross, heads, cross.k_proj, cross.v_proj)
            leave("a", cross.out_proj, layer.encoder_attn_layer_norm)
        p.activated(enter(layer.final_layer_norm), layer.fc1, c.activation_function)
        leave("g", layer.fc2, layer.final_layer_norm)
        p.outputs.append(len(p.ops) - 1)
    last = getattr(body, "layer_norm", None)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, last) if last else p.copy(src, dst))


def t5(p: Program, model: Any, encoder: bool = False) -> None:
    """T5, mT5, UMT5 and LongT5, the decoder, or the encoder: unscaled attention with relative position biases."""
    c, body = model.config, model.get_encoder() if encoder else model.get_decoder()
    heads = SimpleNamespace(num_attention_heads=c.num_heads, sliding_window=None)
    p.buffers(model, c.d_ff, c.num_heads * c.d_kv, c.num_heads * c.d_kv)
    p.embed(body.embed_tokens)
    biased: Any = None  # the attention whose relative position biases the layer uses
    for i, block in enumerate(body.block):
        first, *crosses, feed = block.layer
        own, dense = first.SelfAttention, feed.DenseReluDense
        p.rms_norm("x", "h", first.layer_norm)
        for dst, layer in (("q", own.q), ("k", own.k), ("v", own.v)):
            p.linear("h", dst, layer, wait=dst == "v")
        p.attend(i, own, heads, scale=1.0)
        biased = own if own.has_relative_attention_bias else biased
        p.biased.append((p.ops[-1], biased))
        p.linear("a", "x", own.o, add=True)
        for part in crosses:
            source = part.EncDecAttention
            p.rms_norm("x", "h", part.layer_norm)
            p.linear("h", "q", source.q)
            p.cross(source, heads, source.k, source.v)
            p.linear("a", "x", source.o, add=True)
        p.rms_norm("x", "h", feed.layer_norm)
        if c.is_gated_act:
            p.gated("h", SimpleNamespace(gate_proj=dense.wi_0, up_proj=dense.wi_1), c.dense_act_fn)
        else:
            p.activated("h", dense.wi, c.dense_act_fn)
        p.linear("g", "x", dense.wo, add=True)
        p.outputs.append(len(p.ops) - 1)

    def last(src: str, dst: str) -> None:
        p.rms_norm(src, dst, body.final_layer_norm)
        if c.tie_word_embeddings if c.model_type == "umt5" else getattr(c, "scale_decoder_outputs", False):
            p.copy(dst, dst, c.d_model**-0.5)

    p.end(model, last)


def t5gemma(p: Program, model: Any, encoder: bool = False) -> None:
    """T5Gemma, the decoder: Gemma 2 with attention to the source in each layer, and norms around that too."""
    if encoder:
        raise NotCompilable("its encoder attends within windows to both sides")
    body = model.get_decoder()
    c, heads = body.config, body.config.num_attention_heads
    head, cap = body.layers[0].self_attn.head_dim, c.attn_logit_softcapping or 0.0
    decoder = SimpleNamespace(config=c, get_output_embeddings=model.get_output_embeddings)
    norm = partial(p.rms_norm, offset=1.0)

    def leave(src: str, last: Any, after: Any) -> None:
        p.linear(src, "t", last)
        norm("t", "t", after)
        p.add("x", "t", "x")

    p.rotary = body.rotary_emb
    p.buffers(decoder, c.intermediate_size, heads * head, kv_heads(c) * head)
    p.embed(body.embed_tokens, torch.tensor(c.hidden_size**0.5, dtype=p.dtype).item())
    for i, layer in enumerate(body.layers):
        own, cross, mlp = layer.self_attn, layer.cross_attn, layer.mlp
        norm("x", "h", layer.pre_self_attn_layernorm)
        p.qkv("h", own, c)
        p.attend(i, own, c, cap=cap)
        leave("a", own.o_proj, layer.post_self_attn_layernorm)
        norm("x", "h", layer.pre_cross_attn_layernorm)
        p.linear("h", "q", cross.q_proj)
        p.cross(cross, c, cross.k_proj, cross.v_proj, cap=cap)
        leave("a", cross.o_proj, layer.post_cross_attn_layernorm)
        norm("x", "h", layer.pre_feedforward_layernorm)
        p.gated("h", mlp, c.hidden_activation)
        leave("g", mlp.down_proj, layer.post_feedforward_layernorm)
        p.outputs.append(len(p.ops) - 1)
    p.end(decoder, lambda src, dst: norm(src, dst, body.norm), c.final_logit_softcapping or 0.0)


SEQ2SEQ_PROGRAMS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("bart", "mbart", "plbart", "marian", "pegasus", "blenderbot", "m2m_100"), bart),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), t5),
    "t5gemma": t5gemma,
}


def layer_types_of(stack: Any) -> list[str]:
    """The kind of each layer of an encoder or a decoder.

    Raises:
        Refused: `stack` is another model without a list of layers.
    """
    layers = getattr(stack, "layers", None) or getattr(stack, "block", None)
    if layers is None:
        raise Refused(
            f"{type(stack).__name__} cannot be hosted exactly as one half of a model: its layers are not known"
        )
    return getattr(getattr(stack, "config", None), "layer_types", None) or ["full_attention"] * len(layers)
