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

from truedraft.runtime import mixtures
from truedraft.runtime.blocks import (
    AFTER,
    AROUND,
    BEFORE,
    OF_GLM,
    Norms,
    blocks,
    experts,
    final,
    gate,
    rotate_by_layer,
    spread,
    ungated,
)
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable


def llama(p: Program, model: Any) -> None:
    """Llama, Mistral, Ministral, Qwen 2, Phi 3, Seed-OSS, Emu 3; with norms over each head, Qwen 3."""
    c = model.config
    p.begin(model, c.intermediate_size)
    per_head = 0.0 if c.model_type.startswith("qwen3") else None
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), per_head=per_head)
    final(p, model, p.rms_norm)


def phi4_multimodal(p: Program, model: Any) -> None:
    """Phi-4 multimodal: Llama with part of each head rotated."""
    p.aside = [model.model.embed_tokens_extend]
    llama(p, model)


def molmo2(p: Program, model: Any) -> None:
    """Molmo 2: Llama with norms over each head, or over all queries and keys together, and before or after blocks; some
    layers rotate as if texts were short."""
    c, body = model.config, model.model
    p.rotaries = {i: body.rotary_emb_unscaled for i, kind in enumerate(body.rope_types) if kind == "unscaled"}
    norms: Norms = (None, "input_layernorm", None, "post_attention_layernorm") if c.norm_after else BEFORE
    whole = p.rms_norm if c.qk_norm_type == "olmo" else None
    p.begin(model, c.intermediate_size)
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), norms, whole=whole, per_head=None if whole else 0.0)
    final(p, model, p.rms_norm)


def smollm3(p: Program, model: Any) -> None:
    """SmolLM 3: Llama with some layers that do not rotate."""
    p.unrotated = {i for i, layer in enumerate(model.model.layers) if not layer.self_attn.use_rope}
    llama(p, model)


def ministral3(p: Program, model: Any) -> None:
    """Ministral 3: Llama with queries scaled by their positions."""
    rope = model.config.rope_parameters
    beta, length = rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]
    p.factor = lambda positions: (1 + beta * torch.log(1 + torch.floor(positions / length))).to(p.dtype)
    p.factored = set(range(len(model.model.layers)))
    llama(p, model)


def hunyuan(p: Program, model: Any) -> None:
    """HunYuan: Llama with norms over each head after the rotation; with experts, HunYuan MoE."""
    c, of = model.config, mixtures.of_hunyuan
    mixtures.reserve(p, map(of, model.model.layers))
    p.begin(model, 0)
    blocks(p, model, p.rms_norm, experts(p, c.hidden_act, of=of), per_head=0.0, norms_last=True)
    final(p, model, p.rms_norm)


def arcee(p: Program, model: Any) -> None:
    """Arcee: Llama with a feed-forward without a gate; with layer norms, JAIS 2."""
    c = model.config
    norm = p.layer_norm if c.model_type == "jais2" else p.rms_norm
    p.begin(model, c.intermediate_size)
    blocks(p, model, norm, ungated(p, c.hidden_act))
    final(p, model, norm)


def nanochat(p: Program, model: Any) -> None:
    """nanochat: norms without weights, of embeddings too and over each head after the rotation, which is the other way
    round; a feed-forward without a gate, capped logits."""
    c, rotary = model.config, model.model.rotary_emb

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        cosines, sines = rotary(like, positions)
        return cosines, -sines

    p.begin(model, c.intermediate_size, rotary=tables)
    p.rms_norm("x", "x", model.model.norm)
    p.outputs = [len(p.ops) - 1]
    blocks(p, model, p.rms_norm, ungated(p, c.hidden_act, "fc1", "fc2"), per_head=0.0, norms_last=True)
    final(p, model, p.rms_norm, c.final_logit_softcapping or 0.0)


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
    """GLM and, with norms around each block, GLM 4, GLM-4V, GLM-OCR: neighbours rotate together, in part of a head."""
    c, rotary = model.config, model.model.rotary_emb
    norms = BEFORE if c.model_type == "glm" else OF_GLM
    p.begin(model, c.intermediate_size, rotary=spread(rotary) if c.model_type in ("glm", "glm4") else rotary)
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


def gemma(p: Program, model: Any) -> None:
    """Gemma, norm weights relative to one: in Gemma 2 and 3 norms around every block; in Gemma 2 and VaultGemma capped
    scores."""
    c = model.config
    norm = partial(p.rms_norm, offset=1.0)
    scale = model.get_input_embeddings().embed_scale.to(model.dtype).item()
    p.begin(model, c.intermediate_size, scale)
    norms = {"gemma": BEFORE, "vaultgemma": ("input_layernorm", None, "pre_feedforward_layernorm", None)}
    activation = c.hidden_act if c.model_type == "gemma" else c.hidden_activation
    cap = getattr(model.model.layers[0].self_attn, "attn_logit_softcapping", None) or 0.0
    per_head = 1.0 if c.model_type == "gemma3_text" else None
    blocks(p, model, norm, gate(p, activation), norms.get(c.model_type, AROUND), cap=cap, per_head=per_head)
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


def granite(p: Program, model: Any) -> None:
    """Granite: Llama with a factor on embeddings, blocks and logits; with sinks and windows, Granite SWA."""
    c = model.config
    rotate_by_layer(p, model)
    p.begin(model, c.intermediate_size, c.embedding_multiplier, given_too=True)
    blocks(p, model, p.rms_norm, gate(p, c.hidden_act), scale=c.residual_multiplier)
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
    "hunyuan_v1_moe": hunyuan,
    "arcee": arcee,
    "jais2": arcee,
    "nanochat": nanochat,
    "cwm": llama,
    "bitnet": bitnet,
    "apertus": apertus,
    "ernie4_5": ernie,
    "ernie4_5_moe": ernie,
    "glm": glm,
    "glm4": glm,
    "glm4v_text": glm,
    "glm_ocr_text": glm,
    "helium": helium,
    "qwen2": llama,
    "qwen2_vl_text": llama,
    "qwen2_5_vl_text": llama,
    "qwen3": llama,
    "qwen3_vl_text": llama,
    "phi3": llama,
    "phi4_multimodal": phi4_multimodal,
    "emu3_text_model": llama,
    "paddleocr_vl_text": llama,
    "gemma": gemma,
    "gemma2": gemma,
    "gemma3_text": gemma,
    "vaultgemma": gemma,
    "olmo": olmo,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "flex_olmo": olmo2,
    "exaone4": exaone4,
    "exaone_moe": exaone4,
    "granite": granite,
    "granite_swa": granite,
    "granite_docling_text": granite,
    "molmo2_text": molmo2,
    "hyperclovax": hyperclovax,
    "starcoder2": starcoder2,
    "nemotron": nemotron,
    "stablelm": stablelm,
}
