"""Models of which each block is attention and then a feed-forward, as lists of operations for the compiled pass.

See `programs.py`, which has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime import latents, mixtures
from truedraft.runtime.blocks import AFTER, AROUND, BEFORE, Norms, blocks, experts, final, gate, spread, ungated
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable


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


def bitnet(p: Program, model: Any) -> None:
    """BitNet, its weights unpacked: Llama with norms before the last layers of attention and feed-forward."""
    c, dense = model.config, gate(p, model.config.hidden_act)

    def mixed(src: str, index: int, attention: Any) -> str:
        p.qkv(src, attention, c)
        p.attend(index, attention, c)
        p.rms_norm("a", "a", attention.attn_sub_norm)
        return "a"

    def feed(src: str, layer: Any) -> Any:
        last = dense(src, layer)
        p.rms_norm("g", "g", layer.mlp.ffn_sub_norm)
        return last

    p.begin(model, c.intermediate_size)
    blocks(p, model, p.rms_norm, feed, mixed=mixed)
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
    """ERNIE 4.5: Llama with neighbours rotated together, rounded once; with experts, ERNIE 4.5 MoE."""
    c = model.config
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0, rotary=spread(model.model.rotary_emb))
    feed = experts(p, c.hidden_act, routing=mixtures.balanced)
    blocks(p, model, p.rms_norm, feed, interleaved=True, once=True)
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
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    per_head = 0.0 if c.model_type.startswith("qwen3") else None
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act, c.model_type == "mixtral"), per_head=per_head)
    final(p, model, p.rms_norm)


def deepseek(p: Program, model: Any) -> None:
    """DeepSeek 2 and 3, GLM 4.7 Flash, Youtu, MiniCPM 3: attention to latents, mixtures of experts or one feed-forward.

    MiniCPM 3 has factors on embeddings, blocks and the final hidden state.
    """
    c, layers = model.config, model.model.layers
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    mixtures.reserve(p, (layer.mlp for layer in layers))
    mixed = latents.attention(p, model)
    p.embed(model.get_input_embeddings(), scale)
    routing = mixtures.limited if c.model_type == "deepseek_v2" else mixtures.corrected
    feed = experts(p, c.hidden_act, True, routing)
    blocks(p, model, p.rms_norm, feed, scale=getattr(layers[0], "residual_scale", 1.0), mixed=mixed)

    def last(src: str, dst: str, norm: Any) -> None:
        p.rms_norm(src, dst, norm)
        if c.model_type == "minicpm3":
            p.copy(dst, dst, 1 / c.logits_scaling)

    final(p, model, last)


def dots1(p: Program, model: Any) -> None:
    """dots.llm1, GLM 4.5, Solar Open: mixtures of experts whose router computes in fp32, dense layers among them."""
    c = model.config
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    per_head = 0.0 if hasattr(model.model.layers[0].self_attn, "q_norm") else None
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act, True, mixtures.corrected), per_head=per_head)
    final(p, model, p.rms_norm)


def olmoe(p: Program, model: Any) -> None:
    """OLMoE: mixtures of experts, norms over all queries and keys together, which may be clipped."""
    c = model.config
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
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
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    blocks(p, model, norm, experts(p, c.hidden_act), AFTER, whole=norm, once=True)
    final(p, model, norm)


def exaone4(p: Program, model: Any) -> None:
    """EXAONE 4, norms after the blocks, and EXAONE MoE, norms before them and mixtures of experts as in dots.llm1.

    Both have norms over each head; beside sliding windows, full attention does not rotate.
    """
    c, mixed = model.config, model.config.model_type == "exaone_moe"
    attentions = [layer.self_attn for layer in model.model.layers]
    p.unrotated = {i for i, a in enumerate(attentions) if a.sliding_window is not None and not a.is_sliding}
    mixtures.reserve(p, (layer.mlp for layer in model.model.layers))
    p.begin(model, 0)
    feed = experts(p, c.hidden_act, True, mixtures.corrected)
    blocks(p, model, p.rms_norm, feed, BEFORE if mixed else AFTER, per_head=0.0)
    final(p, model, p.rms_norm)


def rotate_by_layer(p: Program, model: Any) -> None:
    """The rotary embedding of each layer, where each has its own base or zero, for none."""
    if hasattr(model.model, "rotary_embs"):
        bases, by_base = model.config.layer_rope_theta, model.model.rotary_embs
        p.rotaries = {
            i: r for i, base in enumerate(bases) for r in by_base if r.config.rope_parameters["rope_theta"] == base
        }
        p.unrotated = set(range(len(bases))) - set(p.rotaries)


def granite(p: Program, model: Any) -> None:
    """Granite: Llama with a factor on embeddings, blocks and logits; with sinks and windows, Granite SWA."""
    c = model.config
    rotate_by_layer(p, model)
    p.begin(model, c.intermediate_size, c.embedding_multiplier, given_too=True)
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), scale=c.residual_multiplier)
    final(p, model, p.rms_norm, scale=1 / c.logits_scaling)


def granite_moe(p: Program, model: Any) -> None:
    """Granite MoE: Granite with mixtures of experts, and perhaps a feed-forward beside each."""
    c = model.config
    rotate_by_layer(p, model)

    def feed(src: str, layer: Any) -> None:
        mixtures.routed(p, src, mixtures.of_granite(layer), c.hidden_act)

    mixtures.reserve(p, map(mixtures.of_granite, model.model.layers))
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
        mixtures.clamped(p, src, layer.mlp)

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


SEQUENTIAL: dict[str, Callable[[Program, Any], None]] = {
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
    "bitnet": bitnet,
    "apertus": apertus,
    "ernie4_5": ernie,
    "ernie4_5_moe": ernie,
    "dots1": dots1,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "glm4_moe_lite": deepseek,
    "youtu": deepseek,
    "minicpm3": deepseek,
    "glm4_moe": dots1,
    "solar_open": dots1,
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
    "exaone_moe": exaone4,
    "granite": granite,
    "granite_swa": granite,
    "granitemoe": granite_moe,
    "granitemoe_swa": granite_moe,
    "granitemoeshared": granite_moe,
    "hyperclovax": hyperclovax,
    "gpt_oss": gpt_oss,
    "starcoder2": starcoder2,
    "nemotron": nemotron,
    "stablelm": stablelm,
    "mixtral": mixtral,
    "qwen2_moe": mixtral,
    "qwen3_moe": mixtral,
    "qwen3_vl_moe_text": mixtral,
    "olmoe": olmoe,
}
