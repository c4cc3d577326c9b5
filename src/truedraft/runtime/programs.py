"""Models as lists of operations for the compiled pass: one short function per architecture.

A program is built from the modules of a `transformers` model and reads their weights in place; only norms, biases and
scales are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import get_layer_types_and_kwargs

from truedraft.runtime.fingerprint import hooked
from truedraft.runtime.program import Program
from truedraft.runtime.seq2seq_programs import SEQ2SEQ_PROGRAMS, layers_of
from truedraft.runtime.text import text_of
from truedraft.runtime.weights import Copies, NotCompilable

Norm = Callable[[str, str, Any], None]
OWN = ("torch.nn.modules.", "transformers.", "torchao.")  # packages of the modules that programs support
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


# ---------------------------------------------------------------- architectures


def pre_norm(
    p: Program, model: Any, norm: Norm, feed: Callable[[Any], Any], per_head: float | None = None, scale: float = 1.0
) -> None:  # fmt: skip
    """Blocks with a norm before attention and a norm before the feed-forward, each added to the residual.

    feed: writes the hidden activations of a layer's feed-forward from "h" to "g", and returns the linear layer after
        them; or writes its whole result to "t", and returns None.
    scale: factor on the output of each block.
    """
    c = model.config
    for i, layer in enumerate(model.model.layers):
        norm("x", "h", layer.input_layernorm)
        p.qkv("h", layer.self_attn, c)
        p.attend(i, layer.self_attn, c, per_head=per_head)
        p.linear("a", "x", layer.self_attn.o_proj, add=True, scale=scale)
        norm("x", "h", layer.post_attention_layernorm)
        down = feed(layer.mlp)
        if down is None:
            p.add("x", "t", "x")
        else:
            p.linear("g", "x", down, add=True, scale=scale)
        p.outputs.append(len(p.ops) - 1)


def llama(p: Program, model: Any) -> None:
    """Llama, Mistral, Qwen 2, Phi 3; with norms over each head, Qwen 3."""
    c = model.config
    p.begin(model, c.intermediate_size)
    pre_norm(p, model, p.rms_norm, p.gate(c.hidden_act), per_head=0.0 if c.model_type.startswith("qwen3") else None)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm))


def mixtral(p: Program, model: Any) -> None:
    """Mixtral, Qwen 2 MoE and, with norms over each head, Qwen 3 MoE: mixtures of experts, dense layers among them."""
    c = model.config
    dense = p.gate(c.hidden_act)

    def feed(mlp: Any) -> Any:
        if not hasattr(mlp, "experts"):
            return dense(mlp)
        p.mixture(mlp, c.hidden_act, exact=c.model_type == "mixtral")
        return None

    p.mixtures(layer.mlp for layer in model.model.layers)
    p.begin(model, 0)
    pre_norm(p, model, p.rms_norm, feed, per_head=0.0 if c.model_type.startswith("qwen3") else None)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm))


def olmoe(p: Program, model: Any) -> None:
    """OLMoE: mixtures of experts, norms over all queries and keys together."""
    c = model.config
    if c.clip_qkv is not None:
        raise NotCompilable("its queries, keys and values are clipped")
    p.mixtures(layer.mlp for layer in model.model.layers)
    p.begin(model, 0)
    for i, layer in enumerate(model.model.layers):
        p.rms_norm("x", "h", layer.input_layernorm)
        p.qkv("h", layer.self_attn, c)
        p.rms_norm("q", "q", layer.self_attn.q_norm)
        p.rms_norm("k", "k", layer.self_attn.k_norm)
        p.attend(i, layer.self_attn, c)
        p.linear("a", "x", layer.self_attn.o_proj, add=True)
        p.rms_norm("x", "h", layer.post_attention_layernorm)
        p.mixture(layer.mlp, c.hidden_act)
        p.add("x", "t", "x")
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm))


def gemma(p: Program, model: Any) -> None:
    """Gemma 2 and 3: norms before and after every block, norm weights relative to one, capped scores."""
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
    """OLMo 2: norms after the blocks, and over all queries and keys together."""
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
    p.end(model, lambda src, dst: p.rms_norm(src, dst, model.model.norm), scale=1 / c.logits_scaling)


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
        raise NotCompilable("its queries and keys are normalised, or its blocks are parallel")
    p.begin(model, c.intermediate_size)
    pre_norm(p, model, p.layer_norm, p.gate(c.hidden_act))
    p.end(model, lambda src, dst: p.layer_norm(src, dst, model.model.norm))


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


def cohere(p: Program, model: Any) -> None:
    """Cohere: parallel attention and gated feed-forward, interleaved rotary embedding, scaled logits."""
    c = model.config
    if c.use_qk_norm:
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
    p.end(model, lambda src, dst: p.layer_norm(src, dst, model.model.norm), scale=model.logit_scale)


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
    "qwen2": llama,
    "qwen2_vl_text": llama,
    "qwen2_5_vl_text": llama,
    "qwen3": llama,
    "qwen3_vl_text": llama,
    "phi3": llama,
    "gemma2": gemma,
    "gemma3_text": gemma,
    "olmo2": olmo2,
    "granite": granite,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
    "phi": phi,
    "cohere": cohere,
    "gpt_neox": gpt_neox,
    "opt": opt,
    "mixtral": mixtral,
    "qwen2_moe": mixtral,
    "qwen3_moe": mixtral,
    "qwen3_vl_moe_text": mixtral,
    "olmoe": olmoe,
}


def compile_program(model: Any, copied: Copies | None = None) -> Program:
    """The program of a decoder language model, or of the language model in a model that also reads images or sounds.

    copied: see `Program`.

    Raises:
        NotCompilable: the compiled pass cannot replace the model's forward; says why.
    """
    text = text_of(model)
    return _compiled(model, text, PROGRAMS, get_layer_types_and_kwargs(text.config)[0], copied)


def compile_seq2seq(model: Any, encoder: bool, copied: Copies | None = None) -> Program:
    """The program of one stack of an encoder-decoder, its encoder or its decoder. Raises as `compile_program`."""
    if encoder and model.config.model_type == "longt5":
        raise NotCompilable("its encoder attends locally only")
    programs = {name: partial(make, encoder=encoder) for name, make in SEQ2SEQ_PROGRAMS.items()}
    stack = model.get_encoder() if encoder else model.get_decoder()
    return _compiled(model, model, programs, ["full_attention"] * layers_of(stack), copied)


def _compiled(
    model: Any, text: Any, programs: Mapping[str, Callable[[Program, Any], None]], layer_types: list[str],
    copied: Copies | None,
) -> Program:  # fmt: skip
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
    program = Program(model.dtype == torch.bfloat16, layer_types, copied=copied)
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
