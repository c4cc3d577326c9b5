"""Models as lists of operations for the compiled pass: one short function per architecture.

A program is built from the modules of a `transformers` model and reads their weights in place; only norms, biases and
scales are copied. Those whose blocks are attention and then a feed-forward are in `sequential_programs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from truedraft.caches.states import STATE_LAYERS, layer_kinds
from truedraft.runtime import mixtures
from truedraft.runtime.blocks import final
from truedraft.runtime.fingerprint import hooked
from truedraft.runtime.gemma3n_program import gemma3n
from truedraft.runtime.gemma_programs import GEMMA
from truedraft.runtime.mamba_programs import MAMBA
from truedraft.runtime.mixture_programs import MIXTURES
from truedraft.runtime.modules import outputs_of
from truedraft.runtime.program import Program
from truedraft.runtime.scan_programs import SCANS
from truedraft.runtime.seq2seq_programs import SEQ2SEQ_PROGRAMS, layer_types_of
from truedraft.runtime.sequential_programs import SEQUENTIAL
from truedraft.runtime.state_programs import lfm, minimax, olmo_hybrid, qwen3_5
from truedraft.runtime.text import text_of
from truedraft.runtime.weights import Copies, NotCompilable

OWN = ("torch.nn.modules.", "transformers.", "torchao.")  # packages of the modules that programs support
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")


# ---------------------------------------------------------------- architectures


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
    in layers with a sliding window only; with experts, Cohere 2 MoE."""
    c, layers = model.config, model.model.layers
    if c.model_type == "cohere":
        if c.use_qk_norm:
            raise NotCompilable("its queries and keys are normalised")
    else:
        attentions = [layer.self_attn for layer in layers]
        p.unrotated = {
            i for i, a in enumerate(attentions) if a.sliding_window is None and not getattr(a, "force_rope", False)
        }
    if getattr(c, "expert_selection_fn", "softmax") != "softmax":
        raise NotCompilable(f"its experts are chosen by a {c.expert_selection_fn}")
    norm = p.layer_norm if getattr(c, "rms_norm_eps", None) is None else p.rms_norm
    mixtures.reserve(p, (layer.mlp for layer in layers))
    p.begin(model, 0)
    for i, layer in enumerate(layers):
        norm("x", "h", layer.input_layernorm)
        p.qkv("h", layer.self_attn, c)
        p.attend(i, layer.self_attn, c, once=True, interleaved=True)
        p.linear("a", "x", layer.self_attn.o_proj, add=True)
        if hasattr(layer.mlp, "experts"):
            mixtures.routed(p, "h", layer.mlp, c.hidden_act, mode=1)
            if c.num_shared_experts and c.shared_expert_combination_strategy == "average":
                p.copy("t", "t", 0.5)
            p.add("x", "t", "x")
        else:
            p.gated("h", layer.mlp, c.hidden_act)
            p.linear("g", "x", layer.mlp.down_proj, add=True)
        p.outputs.append(len(p.ops) - 1)
    final(p, model, norm, scale=getattr(model, "logit_scale", 1.0))


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
        _gpt_feed_forward(p, layer, c)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.ln_f))


def _gpt_feed_forward(p: Program, layer: Any, c: Any) -> None:
    p.layer_norm("x", "h", layer.ln_2)
    p.activated("h", layer.mlp.c_fc, c.activation_function)
    p.linear("g", "x", layer.mlp.c_proj, add=True)
    p.outputs.append(len(p.ops) - 1)


def gpt_neo(p: Program, model: Any) -> None:
    """GPT-Neo: GPT-2 with queries, keys and values apart, unscaled scores, and windows in every other layer."""
    c, body = model.config, model.transformer
    attentions = [layer.attn.attention for layer in body.h]
    heads = SimpleNamespace(num_attention_heads=c.num_heads, sliding_window=c.window_size)
    p.layer_types = ["sliding_attention" if a.attention_type == "local" else "full_attention" for a in attentions]
    p.begin(model, outputs_of(body.h[0].mlp.c_fc), attention=attentions[0], positions=body.wpe)
    for i, (layer, attention) in enumerate(zip(body.h, attentions, strict=True)):
        p.layer_norm("x", "h", layer.ln_1)
        p.qkv("h", attention, heads)
        p.attend(i, attention, heads, scale=1.0)
        p.linear("a", "x", attention.out_proj, add=True)
        _gpt_feed_forward(p, layer, c)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.ln_f))


def bloom(p: Program, model: Any) -> None:
    """BLOOM: biases by the positions of keys (ALiBi), queries, keys and values of a head fused, normed embeddings."""
    c, body = model.config, model.transformer
    if c.pretraining_tp > 1 and c.slow_but_exact:
        raise NotCompilable("it multiplies weights by parts, as it was trained")

    def biases(positions: Tensor) -> Tensor:
        everything = torch.ones(1, len(positions), dtype=torch.long)
        return body.build_alibi_tensor(everything, c.n_head, p.dtype)[:, 0]

    p.lean = biases
    p.buffer("qkv", 3 * c.hidden_size)
    p.begin(model, outputs_of(body.h[0].mlp.dense_h_to_4h), attention=body.h[0].self_attention)
    p.layer_norm("x", "x", body.word_embeddings_layernorm)
    p.outputs = [len(p.ops) - 1]
    for i, layer in enumerate(body.h):
        attention, mlp = layer.self_attention, layer.mlp
        p.layer_norm("x", "h", layer.input_layernorm)
        if c.apply_residual_connection_post_layernorm:
            p.copy("h", "x")
        p.linear("h", "qkv", attention.query_key_value)
        p.attend(i, attention, c, fused="qkv", scale=attention.inv_norm_factor)
        p.linear("a", "x", attention.dense, add=True)
        p.layer_norm("x", "h", layer.post_attention_layernorm)
        if c.apply_residual_connection_post_layernorm:
            p.copy("h", "x")
        p.activated("h", mlp.dense_h_to_4h, "gelu_pytorch_tanh")
        p.linear("g", "x", mlp.dense_4h_to_h, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, body.ln_f))


def opt(p: Program, model: Any) -> None:
    """OPT, XGLM and BioGPT: positions from a table, norms before blocks; scaled queries, in BioGPT scaled scores."""
    c = model.config
    body = model.biogpt if c.model_type == "biogpt" else getattr(model.model, "decoder", model.model)
    table, positions = body.embed_tokens, body.embed_positions
    if c.model_type == "opt" and (
        not c.do_layer_norm_before or body.final_layer_norm is None or body.project_in or body.project_out
    ):
        raise NotCompilable("its norms are after the blocks, or its embeddings are projected")
    last = body.final_layer_norm if c.model_type == "opt" else body.layer_norm
    if c.model_type == "xglm":
        positions = SimpleNamespace(weight=positions.weights, offset=positions.offset)
    layers, activation = body.layers, c.hidden_act if c.model_type == "biogpt" else c.activation_function
    p.begin(
        model, outputs_of(layers[0].fc1), getattr(table, "embed_scale", 1.0), attention=layers[0].self_attn,
        positions=positions, offset=positions.offset,
    )  # fmt: skip
    for i, layer in enumerate(layers):
        attention = layer.self_attn
        queries, scores = (1.0, attention.scaling) if c.model_type == "biogpt" else (attention.scaling, 1.0)
        p.layer_norm("x", "h", layer.self_attn_layer_norm)
        p.linear("h", "q", attention.q_proj, scale=queries, wait=False)
        p.linear("h", "k", attention.k_proj, wait=False)
        p.linear("h", "v", attention.v_proj)
        p.attend(i, attention, c, scale=scores)
        p.linear("a", "x", attention.out_proj, add=True)
        p.layer_norm("x", "h", layer.final_layer_norm)
        p.activated("h", layer.fc1, activation)
        p.linear("g", "x", layer.fc2, add=True)
        p.outputs.append(len(p.ops) - 1)
    p.end(model, lambda src, dst: p.layer_norm(src, dst, last))


PROGRAMS: dict[str, Callable[[Program, Any], None]] = {
    **SEQUENTIAL,
    **MIXTURES,
    **GEMMA,
    "gemma3n_text": gemma3n,
    "phi": phi,
    "cohere": cohere,
    "cohere2": cohere,
    "cohere2_moe": cohere,
    "gpt_neox": gpt_neox,
    "gpt2": gpt2,
    "gpt_bigcode": gpt2,
    "gptj": gptj,
    "falcon": falcon,
    "codegen": gptj,
    "opt": opt,
    "xglm": opt,
    "biogpt": opt,
    "gpt_neo": gpt_neo,
    "bloom": bloom,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen3_next": qwen3_5,
    **MAMBA,
    **SCANS,
    "olmo_hybrid": olmo_hybrid,
    "lfm2": lfm,
    "lfm2_moe": lfm,
    "lfm3": lfm,
    "minimax": minimax,
}


def compile_program(model: Any, copied: Copies | None = None) -> Program:
    """The program of a decoder language model, or of the language model in a model that also reads images or sounds.

    copied: see `Program`.

    Raises:
        NotCompilable: the compiled pass cannot replace the model's forward; says why.
    """
    text = text_of(model)
    kinds = layer_kinds(text.config)
    attending = [kind for kind in kinds if kind not in STATE_LAYERS and kind != "dummy"]
    return _compiled(model, text, PROGRAMS, attending, copied)


def compile_seq2seq(model: Any, encoder: bool, copied: Copies | None = None) -> Program:
    """The program of one stack of an encoder-decoder, its encoder or its decoder. Raises as `compile_program`."""
    if encoder and model.config.model_type == "longt5":
        raise NotCompilable("its encoder attends locally only")
    programs = {name: partial(make, encoder=encoder) for name, make in SEQ2SEQ_PROGRAMS.items()}
    stack = model.get_encoder() if encoder else model.get_decoder()
    return _compiled(model, model, programs, layer_types_of(stack), copied)


def programs_of(model: Any, copied: Copies | None = None) -> list[Program]:
    """All programs of a model: that of a decoder, or those of the two stacks of an encoder-decoder. Raises as
    `compile_program`."""
    if model.config.model_type not in SEQ2SEQ_PROGRAMS:
        return [compile_program(model, copied)]
    return [compile_seq2seq(model, encoder, copied) for encoder in (True, False)]


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
    aside = {module for part in program.aside for module in part.modules()}
    modules = [module for module in body.modules() if module not in aside]
    if others := foreign(modules):
        raise NotCompilable(f"it has a {others[0].__name__} of {others[0].__module__}, whose forward is not supported")
    check_activations(modules, program)
    return program


def foreign(modules: Iterable[nn.Module]) -> list[type]:
    """Classes of modules from outside of torch, transformers and torchao, or with a replaced forward."""
    kinds = dict.fromkeys(type(module) for module in modules)
    return [kind for kind in kinds if not (kind.__module__.startswith(OWN) and kind.forward.__module__.startswith(OWN))]


def check_activations(modules: Iterable[nn.Module], program: Program) -> None:
    """Raises NotCompilable where a model's activations are not those of its configuration, which programs follow."""
    named = {type(ACT2FN[name]) for name in program.activations}
    if "silu" in program.activations:
        named.add(nn.SiLU)
    for module in modules:
        if type(module).__module__.startswith(ACTIVATIONS) and type(module) not in named:
            raise NotCompilable(f"it has a {type(module).__name__} where its configuration has another activation")
