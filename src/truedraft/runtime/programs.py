"""Models as lists of operations for the compiled pass: one short function per architecture.

A program is built from the modules of a `transformers` model and reads their weights in place; only norms, biases and
scales are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import get_layer_types_and_kwargs

from truedraft.runtime.fingerprint import hooked
from truedraft.runtime.program import Program
from truedraft.runtime.seq2seq_programs import SEQ2SEQ_PROGRAMS, layers_of
from truedraft.runtime.text import text_of
from truedraft.runtime.weights import NotCompilable

Norm = Callable[[str, str, Any], None]
Feed = Callable[[str, Any], Any]
OWN = ("torch.nn.modules.", "transformers.", "torchao.")  # packages of the modules that programs support
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")

# The norms of a block, by their names: before and after attention, before and after the feed-forward.
Norms = tuple[str | None, str | None, str | None, str | None]
BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND: Norms = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)  # fmt: skip


# ---------------------------------------------------------------- what architectures share


def blocks(
    p: Program, model: Any, norm: Norm, feed: Feed, norms: Norms = BEFORE, scale: float = 1.0,
    whole: Norm | None = None, clip: float | None = None, **attending: Any,
) -> None:  # fmt: skip
    """Blocks of attention and then a feed-forward, each with norms around it and added to the residual.

    feed: writes the hidden activations of a layer's feed-forward to "g", and returns the linear layer after them; or
        writes its whole result to "t", and returns None. Its arguments are the buffer that it reads and the layer.
    norms: the names of the norms; None where there is none.
    scale: factor on the output of each block.
    whole, clip: see `Program.qkv`.
    attending: further arguments of `Program.attend`.
    """
    c = model.config
    before_attention, after_attention, before_feed, after_feed = norms

    def enter(layer: Any, name: str | None) -> str:
        if name is None:
            return "x"
        norm("x", "h", getattr(layer, name))
        return "h"

    def leave(layer: Any, name: str | None, src: str, last: Any) -> None:
        if name is None and last is not None:
            p.linear(src, "x", last, add=True, scale=scale)
            return
        if last is not None:
            p.linear(src, "t", last)
        if name is not None:
            norm("t", "t", getattr(layer, name))
        if scale != 1.0:
            p.copy("t", "t", scale)
        p.add("x", "t", "x")

    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        p.qkv(enter(layer, before_attention), attention, c, whole, clip)
        p.attend(i, attention, c, **attending)
        leave(layer, after_attention, "a", attention.o_proj)
        leave(layer, after_feed, "g", feed(enter(layer, before_feed), layer))
        p.outputs.append(len(p.ops) - 1)


def gate(p: Program, activation: str) -> Feed:
    """Gated feed-forwards."""

    def feed(src: str, layer: Any) -> Any:
        p.gated(src, layer.mlp, activation)
        return layer.mlp.down_proj

    return feed


def ungated(p: Program, activation: str, first: str = "up_proj", last: str = "down_proj") -> Feed:
    """Feed-forwards without a gate; the names of their layers."""

    def feed(src: str, layer: Any) -> Any:
        p.activated(src, getattr(layer.mlp, first), activation)
        return getattr(layer.mlp, last)

    return feed


def experts(p: Program, activation: str, exact: bool = False) -> Feed:
    """Mixtures of experts, gated feed-forwards among them; see `Program.mixture`."""
    dense = gate(p, activation)

    def feed(src: str, layer: Any) -> Any:
        if not hasattr(layer.mlp, "experts"):
            return dense(src, layer)
        p.mixture(src, layer.mlp, activation, exact)
        return None

    return feed


def spread(rotary: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """The tables of a rotary embedding whose cosines are those of two halves, for neighbours that rotate together."""

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in rotary(like, positions)
        )  # fmt: skip

    return tables


def final(p: Program, model: Any, norm: Norm, cap: float = 0.0, scale: float = 1.0) -> None:
    """The final norm and the output head."""
    p.end(model, lambda src, dst: norm(src, dst, model.model.norm), cap, scale)


# ---------------------------------------------------------------- architectures


def llama(p: Program, model: Any) -> None:
    """Llama, Mistral, Ministral, Qwen 2, Phi 3, Seed-OSS; with norms over each head, Qwen 3."""
    c = model.config
    p.begin(model, c.intermediate_size)
    per_head = 0.0 if c.model_type.startswith("qwen3") else None
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), per_head=per_head)
    final(p, model, p.rms_norm)


def smollm3(p: Program, model: Any) -> None:
    """SmolLM 3: Llama with some layers that do not rotate."""
    p.unrotated = {i for i, layer in enumerate(model.model.layers) if not layer.self_attn.use_rope}
    llama(p, model)


def ministral3(p: Program, model: Any) -> None:
    """Ministral 3: Llama with queries scaled by their positions."""
    rope = model.config.rope_parameters
    beta, length = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    p.factor = lambda positions: 1 + beta * torch.log(1 + torch.floor(positions / length))
    llama(p, model)


def hunyuan(p: Program, model: Any) -> None:
    """HunYuan: Llama with norms over each head after the rotation."""
    c = model.config
    p.begin(model, c.intermediate_size)
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), per_head=0.0, norms_last=True)
    final(p, model, p.rms_norm)


def arcee(p: Program, model: Any) -> None:
    """Arcee: Llama with a feed-forward without a gate."""
    c = model.config
    p.begin(model, c.intermediate_size)
    blocks(p, model, p.rms_norm, ungated(p, c.hidden_act))
    final(p, model, p.rms_norm)


def apertus(p: Program, model: Any) -> None:
    """Apertus: Llama with norms over each head, and a feed-forward without a gate."""
    c = model.config

    def feed(src: str, layer: Any) -> Any:
        p.xielu(src, layer.mlp.up_proj, layer.mlp.act_fn)
        return layer.mlp.down_proj

    p.begin(model, c.intermediate_size)
    blocks(
        p, model, p.rms_norm, feed if c.hidden_act == "xielu" else ungated(p, c.hidden_act),
        ("attention_layernorm", None, "feedforward_layernorm", None), per_head=0.0,
    )  # fmt: skip
    final(p, model, p.rms_norm)


def glm(p: Program, model: Any) -> None:
    """GLM and, with norms around each block, GLM 4: neighbours rotated together, in part of each head."""
    c = model.config
    norms: Norms = BEFORE
    if c.model_type == "glm4":
        norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    p.begin(model, c.intermediate_size, rotary=spread(model.model.rotary_emb))
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), norms, interleaved=True)
    final(p, model, p.rms_norm)


def ernie(p: Program, model: Any) -> None:
    """ERNIE 4.5: Llama with neighbours rotated together, rounded once."""
    c = model.config
    p.begin(model, c.intermediate_size, rotary=spread(model.model.rotary_emb))
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), interleaved=True, once=True)
    final(p, model, p.rms_norm)


def helium(p: Program, model: Any) -> None:
    """Helium: Llama with neighbours rotated together, and norms that are rounded once."""
    c = model.config
    norm = partial(p.rms_norm, once=True)
    p.begin(model, c.intermediate_size, rotary=spread(model.model.rotary_emb))
    blocks(p, model, norm, gate(p, c.hidden_act), interleaved=True)
    final(p, model, norm)


def mixtral(p: Program, model: Any) -> None:
    """Mixtral, Qwen 2 MoE and, with norms over each head, Qwen 3 MoE: mixtures of experts, dense layers among them."""
    c = model.config
    p.mixtures(layer.mlp for layer in model.model.layers)
    p.begin(model, 0)
    per_head = 0.0 if c.model_type.startswith("qwen3") else None
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act, c.model_type == "mixtral"), per_head=per_head)
    final(p, model, p.rms_norm)


def olmoe(p: Program, model: Any) -> None:
    """OLMoE: mixtures of experts, norms over all queries and keys together, which may be clipped."""
    c = model.config
    p.mixtures(layer.mlp for layer in model.model.layers)
    p.begin(model, 0)
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act), whole=p.rms_norm, clip=c.clip_qkv)
    final(p, model, p.rms_norm)


def gemma(p: Program, model: Any) -> None:
    """Gemma, norm weights relative to one: from Gemma 2 on norms before and after every block, capped scores."""
    c = model.config
    norm = partial(p.rms_norm, offset=1.0)
    scale = model.get_input_embeddings().embed_scale.to(model.dtype).item()
    p.begin(model, c.intermediate_size, scale)
    if c.model_type == "gemma":
        blocks(p, model, norm, gate(p, c.hidden_act))
    else:
        cap = getattr(model.model.layers[0].self_attn, "attn_logit_softcapping", None) or 0.0
        per_head = 1.0 if c.model_type == "gemma3_text" else None
        blocks(p, model, norm, gate(p, c.hidden_activation), AROUND, cap=cap, per_head=per_head)
    final(p, model, norm, getattr(c, "final_logit_softcapping", None) or 0.0)


def olmo(p: Program, model: Any) -> None:
    """OLMo: Llama with layer norms without weights, and perhaps clipped queries, keys and values."""
    c = model.config
    ones = SimpleNamespace(weight=torch.ones(c.hidden_size), eps=1e-5)

    def norm(src: str, dst: str, _: Any) -> None:
        p.layer_norm(src, dst, ones)

    p.begin(model, c.intermediate_size)
    blocks(p, model, norm, gate(p, c.hidden_act), clip=c.clip_qkv, once=True)
    final(p, model, norm)


def olmo2(p: Program, model: Any) -> None:
    """OLMo 2 and 3: norms after the blocks, and over all queries and keys together; with experts, FlexOLMo."""
    c = model.config
    norm = partial(p.rms_norm, once=True)
    p.mixtures(layer.mlp for layer in model.model.layers)
    p.begin(model, 0)
    blocks(p, model, norm, experts(p, c.hidden_act), AFTER, whole=norm, once=True)
    final(p, model, norm)


def exaone4(p: Program, model: Any) -> None:
    """EXAONE 4: norms after the blocks and over each head; beside sliding windows, full attention does not rotate."""
    c = model.config
    attentions = [layer.self_attn for layer in model.model.layers]
    p.unrotated = {i for i, a in enumerate(attentions) if a.sliding_window is not None and not a.is_sliding}
    p.begin(model, c.intermediate_size)
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), AFTER, per_head=0.0)
    final(p, model, p.rms_norm)


def granite(p: Program, model: Any) -> None:
    """Granite: Llama with a factor on embeddings, blocks and logits."""
    c = model.config
    p.begin(model, c.intermediate_size, c.embedding_multiplier, given_too=True)
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), scale=c.residual_multiplier)
    final(p, model, p.rms_norm, scale=1 / c.logits_scaling)


def granite_moe(p: Program, model: Any) -> None:
    """Granite MoE: Granite with mixtures of experts, and perhaps a feed-forward beside each."""
    c = model.config

    def mixture(layer: Any) -> SimpleNamespace:
        moe, shared = layer.block_sparse_moe, getattr(layer, "shared_mlp", None)
        if shared is not None:
            shared = SimpleNamespace(gate_up_proj=shared.input_linear, down_proj=shared.output_linear)
        return SimpleNamespace(gate=moe.router, experts=moe.experts, shared_expert=shared)

    def feed(src: str, layer: Any) -> None:
        p.mixture(src, mixture(layer), c.hidden_act)

    p.mixtures(mixture(layer) for layer in model.model.layers)
    p.begin(model, 0, c.embedding_multiplier, given_too=True)
    blocks(p, model, p.rms_norm, feed, scale=c.residual_multiplier)
    final(p, model, p.rms_norm, scale=1 / c.logits_scaling)


def hyperclovax(p: Program, model: Any) -> None:
    """HyperCLOVA X: Llama with a factor on embeddings, blocks and logits, and perhaps norms after each block."""
    c = model.config
    norms: Norms = BEFORE
    if c.use_post_norm:
        norms = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    p.begin(model, c.intermediate_size, c.embedding_multiplier, given_too=True)
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), norms, scale=c.residual_multiplier)
    final(p, model, p.rms_norm, scale=c.logits_scaling)


def gpt_oss(p: Program, model: Any) -> None:
    """gpt-oss: attention with sinks, mixtures of experts with biases and clamped gates."""
    c, rotary = model.config, model.model.rotary_emb

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat([table, table], -1) for table in rotary(like, positions))

    def feed(src: str, layer: Any) -> None:
        p.clamped_mixture(src, layer.mlp)

    norm, top = partial(p.rms_norm, once=True), c.num_experts_per_tok
    p.buffer("router", c.num_local_experts)
    p.buffer("routing", top)
    p.buffer("dealt", c.hidden_size, top)
    p.buffer("both", 2 * c.intermediate_size, top)
    p.buffer("inner", c.intermediate_size, top)
    p.begin(model, 0, rotary=tables)
    blocks(p, model, norm, feed)
    final(p, model, norm)


def starcoder2(p: Program, model: Any) -> None:
    """StarCoder 2: layer norms, biases, a feed-forward without a gate."""
    c = model.config
    p.begin(model, c.intermediate_size)
    blocks(p, model, p.layer_norm, ungated(p, c.hidden_act, "c_fc", "c_proj"))
    final(p, model, p.layer_norm)


def nemotron(p: Program, model: Any) -> None:
    """Nemotron: layer norms with weights relative to one, a feed-forward without a gate, part of each head rotated."""
    c = model.config
    p.sums = p.dtype
    norm = partial(p.layer_norm, offset=1.0)
    p.begin(model, c.intermediate_size)
    blocks(p, model, norm, ungated(p, c.hidden_act))
    final(p, model, norm)


def stablelm(p: Program, model: Any) -> None:
    """StableLM: Llama with layer norms and part of each head rotated."""
    c = model.config
    if c.qk_layernorm or c.use_parallel_residual:
        raise NotCompilable("its queries and keys are normalised, or its blocks are parallel")
    p.begin(model, c.intermediate_size)
    blocks(p, model, p.layer_norm, gate(p, c.hidden_act))
    final(p, model, p.layer_norm)


def phi(p: Program, model: Any) -> None:
    """Phi 1 and 2: parallel attention and feed-forward after one norm."""
    c = model.config
    if c.qk_layernorm:
        raise NotCompilable("its queries and keys are normalised")
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


def gptj(p: Program, model: Any) -> None:
    """GPT-J and CodeGen: parallel attention and feed-forward after one norm, neighbours rotated together."""
    c, body = model.config, model.transformer
    attention = body.h[0].attn
    head, heads = attention.head_dim, c.num_attention_heads
    if c.rotary_dim is None:
        raise NotCompilable("its rotation is as wide as its hidden states")

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        known = attention.embed_positions[positions.clamp(max=attention.max_positions - 1)].to(like.dtype)
        sine, cosine = (half.repeat_interleave(2, -1) for half in known.chunk(2, -1))
        return cosine, sine

    parts = 4  # of CodeGen's fused weights, each with queries, values and keys of some heads
    size = heads * head // parts
    if c.model_type == "codegen":
        for name in "qkv":
            p.buffer(name, heads * head)
            for part in range(1, parts):
                p.part(f"{name}{part}", name, part * size)
    p.begin(model, body.h[0].mlp.fc_in.out_features, attention=attention, rotary=tables)
    for i, layer in enumerate(body.h):
        p.layer_norm("x", "h", layer.ln_1)
        if c.model_type == "codegen":
            for part in range(parts):
                for at, name in enumerate("qvk"):
                    first, dst = (3 * part + at) * size, f"{name}{part}" if part else name
                    p.linear("h", dst, layer.attn.qkv_proj, (first, first + size), wait=part == parts - 1 and at == 2)
        else:
            p.qkv("h", layer.attn, c)
        p.attend(i, layer.attn, c, interleaved=True, scale=head**-0.5)
        p.linear("a", "t", layer.attn.out_proj)
        p.activated("h", layer.mlp.fc_in, c.activation_function)
        p.linear("g", "h", layer.mlp.fc_out)
        p.add("t", "h", "h")
        p.add("h", "x", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.ln_f))


def falcon(p: Program, model: Any) -> None:
    """Falcon with one head of keys and values: parallel attention and feed-forward after one norm."""
    c, body = model.config, model.transformer
    if c.alibi or c.new_decoder_architecture or not c.multi_query or not c.parallel_attn:
        raise NotCompilable("its attention has biases or several heads of keys, or its blocks are not parallel")
    attention = body.h[0].self_attention
    heads = SimpleNamespace(num_attention_heads=c.num_attention_heads, num_key_value_heads=1)
    p.begin(model, c.ffn_hidden_size, attention=attention, rotary=body.rotary_emb)
    for i, layer in enumerate(body.h):
        attention = layer.self_attention
        p.layer_norm("x", "h", layer.input_layernorm)
        p.qkv("h", SimpleNamespace(head_dim=attention.head_dim, qkv_proj=attention.query_key_value), heads)
        p.attend(i, attention, heads, scale=attention.inv_norm_factor)
        p.linear("a", "t", attention.dense)
        p.activated("h", layer.mlp.dense_h_to_4h, c.activation)
        p.linear("g", "h", layer.mlp.dense_4h_to_h)
        p.add("h", "t", "h")
        p.add("x", "h", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.ln_f))


def cohere(p: Program, model: Any) -> None:
    """Cohere: parallel attention and gated feed-forward, neighbours rotated together, scaled logits. Cohere 2 rotates
    in layers with a sliding window only."""
    c = model.config
    if c.model_type == "cohere2":
        p.unrotated = {i for i, layer in enumerate(model.model.layers) if layer.self_attn.sliding_window is None}
    elif c.use_qk_norm:
        raise NotCompilable("its queries and keys are normalised")
    p.begin(model, c.intermediate_size)
    for i, layer in enumerate(model.model.layers):
        p.layer_norm("x", "h", layer.input_layernorm)
        p.qkv("h", layer.self_attn, c)
        p.attend(i, layer.self_attn, c, once=True, interleaved=True)
        p.gated("h", layer.mlp, c.hidden_act)
        p.linear("a", "x", layer.self_attn.o_proj, add=True)
        p.linear("g", "x", layer.mlp.down_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    final(p, model, p.layer_norm, scale=getattr(model, "logit_scale", 1.0))


def gpt_neox(p: Program, model: Any) -> None:
    """GPT-NeoX, Pythia: queries, keys and values of a head fused; attention and feed-forward mostly parallel."""
    c, body = model.config, model.gpt_neox
    p.buffer("qkv", 3 * c.hidden_size)
    p.begin(model, c.intermediate_size, attention=body.layers[0].attention, rotary=body.rotary_emb)
    for i, layer in enumerate(body.layers):
        p.layer_norm("x", "h", layer.input_layernorm)
        p.linear("h", "qkv", layer.attention.query_key_value)
        p.attend(i, layer.attention, c, fused="qkv")
        p.linear("a", "t", layer.attention.dense)
        if not c.use_parallel_residual:
            p.add("t", "x", "x")
        p.layer_norm("x", "h", layer.post_attention_layernorm)
        p.activated("h", layer.mlp.dense_h_to_4h, c.hidden_act)
        p.linear("g", "h", layer.mlp.dense_4h_to_h)
        if c.use_parallel_residual:
            p.add("h", "t", "h")
        p.add("h", "x", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.final_layer_norm))


def gpt2(p: Program, model: Any) -> None:
    """GPT-2, whose weights are (in, out), and GPT-BigCode: learned positions, layer norms before the blocks."""
    c, body = model.config, model.transformer
    first = body.h[0]
    apart = getattr(first.attn, "multi_query", True)  # queries, keys and values, not those of each head side by side
    if not apart:
        p.buffer("qkv", 3 * c.hidden_size)
    p.begin(model, first.mlp.c_fc.weight.numel() // c.hidden_size, attention=first.attn, positions=body.wpe)
    for i, layer in enumerate(body.h):
        p.layer_norm("x", "h", layer.ln_1)
        if apart:
            p.qkv("h", layer.attn, c)
        else:
            p.linear("h", "qkv", layer.attn.c_attn)
        p.attend(i, layer.attn, c, scale=layer.attn.scaling, fused=None if apart else "qkv")
        p.linear("a", "x", layer.attn.c_proj, add=True)
        p.layer_norm("x", "h", layer.ln_2)
        p.activated("h", layer.mlp.c_fc, c.activation_function)
        p.linear("g", "x", layer.mlp.c_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.ln_f))


def opt(p: Program, model: Any) -> None:
    """OPT: learned positions, scaled queries, norms before the blocks."""
    c, body = model.config, model.model.decoder
    if not c.do_layer_norm_before or body.final_layer_norm is None or body.project_in or body.project_out:
        raise NotCompilable("its norms are after the blocks, or its embeddings are projected")
    attention = body.layers[0].self_attn
    p.begin(
        model, c.ffn_dim, attention=attention, positions=body.embed_positions, offset=body.embed_positions.offset
    )  # fmt: skip
    for i, layer in enumerate(body.layers):
        attention = layer.self_attn
        p.layer_norm("x", "h", layer.self_attn_layer_norm)
        p.linear("h", "q", attention.q_proj, scale=attention.scaling, wait=False)
        p.linear("h", "k", attention.k_proj, wait=False)
        p.linear("h", "v", attention.v_proj)
        p.attend(i, attention, c, scale=1.0)
        p.linear("a", "x", attention.out_proj, add=True)
        p.layer_norm("x", "h", layer.final_layer_norm)
        p.activated("h", layer.fc1, c.activation_function)
        p.linear("g", "x", layer.fc2, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.final_layer_norm))


PROGRAMS: dict[str, Callable[[Program, Any], None]] = {
    "llama": llama,
    "mistral": llama,
    "ministral": llama,
    "ministral3": ministral3,
    "smollm3": smollm3,
    "seed_oss": llama,
    "internlm3": llama,
    "iquestcoder": llama,
    "hunyuan_v1_dense": hunyuan,
    "arcee": arcee,
    "apertus": apertus,
    "ernie4_5": ernie,
    "glm": glm,
    "glm4": glm,
    "helium": helium,
    "qwen2": llama,
    "qwen2_vl_text": llama,
    "qwen2_5_vl_text": llama,
    "qwen3": llama,
    "qwen3_vl_text": llama,
    "phi3": llama,
    "gemma": gemma,
    "gemma2": gemma,
    "gemma3_text": gemma,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "flex_olmo": olmo2,
    "exaone4": exaone4,
    "granite": granite,
    "granitemoe": granite_moe,
    "granitemoeshared": granite_moe,
    "hyperclovax": hyperclovax,
    "gpt_oss": gpt_oss,
    "starcoder2": starcoder2,
    "nemotron": nemotron,
    "stablelm": stablelm,
    "phi": phi,
    "cohere": cohere,
    "cohere2": cohere,
    "gpt_neox": gpt_neox,
    "gpt2": gpt2,
    "gpt_bigcode": gpt2,
    "gptj": gptj,
    "falcon": falcon,
    "codegen": gptj,
    "opt": opt,
    "mixtral": mixtral,
    "qwen2_moe": mixtral,
    "qwen3_moe": mixtral,
    "qwen3_vl_moe_text": mixtral,
    "olmoe": olmoe,
}


def compile_program(model: Any) -> Program:
    """The program of a decoder language model, or of the language model in a model that also reads images or sounds.

    Raises:
        NotCompilable: the compiled pass cannot replace the model's forward; says why.
    """
    text = text_of(model)
    return _compiled(model, text, PROGRAMS, get_layer_types_and_kwargs(text.config)[0])


def compile_seq2seq(model: Any, encoder: bool) -> Program:
    """The program of one stack of an encoder-decoder, its encoder or its decoder. Raises as `compile_program`."""
    if encoder and model.config.model_type == "longt5":
        raise NotCompilable("its encoder attends locally only")
    programs = {name: partial(make, encoder=encoder) for name, make in SEQ2SEQ_PROGRAMS.items()}
    stack = model.get_encoder() if encoder else model.get_decoder()
    return _compiled(model, model, programs, ["full_attention"] * layers_of(stack))


def _compiled(
    model: Any, text: Any, programs: Mapping[str, Callable[[Program, Any], None]], layer_types: list[str]
) -> Program:
    kind = text.config.model_type
    make = programs.get(kind)
    if make is None:
        raise NotCompilable(f"there is no program for {kind} models")
    if not type(model).__module__.startswith("transformers.models."):
        raise NotCompilable(f"{type(model).__name__} is not a class of transformers")
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise NotCompilable(f"{model.dtype} is neither float32 nor bfloat16")
    if found := hooked(model):
        raise NotCompilable(f"hooks or replaced forwards would not be run ({', '.join(found)})")
    program = Program(model.dtype == torch.bfloat16, layer_types)
    try:
        make(program, text)
    except (AttributeError, TypeError, IndexError) as missing:
        raise NotCompilable(f"its modules are not those of a {kind} model: {missing}") from missing
    body = model if text is model else model.get_decoder()
    if others := foreign(body):
        raise NotCompilable(f"it has a {others[0].__name__} of {others[0].__module__}, whose forward is not supported")
    check_activations(body, program)
    return program


def foreign(model: nn.Module) -> list[type]:
    """Classes of modules from outside of torch, transformers and torchao, or with a replaced forward."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    return [kind for kind in kinds if not (kind.__module__.startswith(OWN) and kind.forward.__module__.startswith(OWN))]


def check_activations(model: nn.Module, program: Program) -> None:
    """Raises NotCompilable where a model's activations are not those of its configuration, which programs follow."""
    named = {type(ACT2FN[name]) for name in program.activations}
    for module in model.modules():
        if type(module).__module__.startswith(ACTIVATIONS) and type(module) not in named:
            raise NotCompilable(f"it has a {type(module).__name__} where its configuration has another activation")
