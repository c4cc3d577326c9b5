"""Tiny random models, sharpened so that their text is not one repeated token."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Emu3ForCausalLM,
    PreTrainedModel,
)

from truedraft.targets.quirks import MIXING_ROWS, RESTARTING, STATES_OUTSIDE

V = 61
PER_LAYER = {"layer_types", "mlp_layer_types", "indexer_types", "layer_rope_theta", "no_rope_layers"}
PER_LAYER |= {
    "activation_sparsity_pattern",
    "intermediate_size",
    "num_attention_heads_per_layer",
}  # lists in configurations, or one number of all
_COMMON: dict[str, Any] = dict(
    vocab_size=V,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
_GPT: dict[str, Any] = dict(
    vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None
)
_KINDS = ["sliding_attention", "full_attention"]
_NO_GQA = {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 8},
    "mistral": {**_COMMON, "sliding_window": 9},
    "ministral": {**_COMMON, "head_dim": 8, "sliding_window": 9, "layer_types": _KINDS},
    "ministral3": {
        **_COMMON,
        "head_dim": 8,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 7,
        },
    },
    "smollm3": {**_COMMON, "no_rope_layers": [1, 0, 1, 0]},
    "seed_oss": {**_COMMON, "head_dim": 8, "attention_out_bias": True},
    "hunyuan_v1_dense": {**_COMMON, "head_dim": 8},
    "internlm3": {**_COMMON, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {**_COMMON, "head_dim": 8},
    "arcee": _COMMON,
    "bitnet": {**_COMMON, "hidden_act": "relu2"},
    "ernie4_5": {**_COMMON, "head_dim": 8, "use_bias": True},
    "glm": {**_COMMON, "head_dim": 8, "attention_bias": True},
    "glm4": {**_COMMON, "head_dim": 8},
    "helium": {**_COMMON, "head_dim": 8},
    "gemma": {**_COMMON, "head_dim": 16},
    "gemma2": {**_COMMON, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_COMMON, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "phi": _COMMON,
    "phi3": _COMMON,
    "gpt2": _GPT,
    "gpt_bigcode": {**_GPT, "multi_query": True},
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "n_embd": 64, "n_head": 8, "rotary_dim": 4},
    "bloom": dict(vocab_size=V, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None),
    "persimmon": _NO_GQA,
    "gpt_neox": _NO_GQA,
    "opt": {
        **{k: v for k, v in _NO_GQA.items() if k != "intermediate_size"},
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": True,
    },
    "mixtral": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {**_COMMON, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {
        **_COMMON,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "olmoe": {
        **_COMMON,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "norm_topk_prob": True,
        "clip_qkv": 1.5,
    },
    "phimoe": {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo": {**_COMMON, "clip_qkv": 2.0},
    "olmo2": _COMMON,
    "olmo3": {**_COMMON, "sliding_window": 9, "layer_types": _KINDS},
    "exaone4": {**_COMMON, "sliding_window": 9, "layer_types": _KINDS},
    "stablelm": _COMMON,
    "starcoder2": {**_COMMON, "sliding_window": None},
    "jais2": {**_COMMON, "head_dim": 8},
    "nanochat": _COMMON,
    "cwm": {**_COMMON, "head_dim": 8, "sliding_window": 9, "layer_types": _KINDS[::-1]},
    "vaultgemma": {**_COMMON, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "nemotron": {**_COMMON, "head_dim": 8},
    "cohere": _COMMON,
    "cohere2": {**_COMMON, "sliding_window": 9, "layer_types": _KINDS},
    "granite": {  # factors default to 1, which would hide a missing one
        **_COMMON,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.5,
    },
}

_GRANITE = ARCHITECTURES["granite"]
_BASES: dict[str, Any] = dict(
    num_hidden_layers=3, sliding_window=9, layer_types=[*_KINDS, _KINDS[0]], layer_rope_theta=[100.0, 0, 10000.0]
)
_EXPERTS: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2)
ARCHITECTURES |= {
    "granitemoe": {**_GRANITE, **_EXPERTS},
    "granitemoeshared": {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 40},
    "granite_swa": {**_GRANITE, **_BASES},
    "granitemoe_swa": {
        **_GRANITE,
        **_BASES,
        **_EXPERTS,
        "num_local_experts": 4,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 40,
    },
    "hyperclovax": {**_GRANITE, "head_dim": 8, "use_post_norm": True},
    "apertus": {**_COMMON, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "falcon": {**_NO_GQA, "ffn_hidden_size": 48},
    "falcon_alibi": {**_NO_GQA, "ffn_hidden_size": 48, "alibi": True},
    "mpt": dict(
        vocab_size=V,
        d_model=32,
        n_layers=2,
        n_heads=4,
        max_seq_len=128,
        bos_token_id=1,
        eos_token_id=None,
    ),
    "gpt_neo": dict(
        vocab_size=V,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        max_position_embeddings=128,
        window_size=9,
        attention_types=[[["local", "global"], 1]],
        bos_token_id=1,
        eos_token_id=None,
    ),
    "flex_olmo": {**_COMMON, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {
        **_COMMON,
        **_EXPERTS,
        "head_dim": 8,
        "sliding_window": 9,
        "layer_types": _KINDS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

ARCHITECTURES |= {
    "llama4_text": {
        **_COMMON,
        **_EXPERTS,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "attention_chunk_size": 7,
        "no_rope_layers": [1, 0, 1],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "moe_layers": [1, 2],
        "intermediate_size_mlp": 40,
    },
}

_SCORED: dict[str, Any] = dict(
    num_local_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_group=4, topk_group=2, n_shared_experts=2,
    first_k_dense_replace=1, routed_scaling_factor=1.7,
)  # fmt: skip
ARCHITECTURES |= {
    "dots1": {**_COMMON, **_SCORED, "head_dim": 8, "sliding_window": 9, "layer_types": _KINDS, "norm_topk_prob": True},
    "glm4_moe": {**_COMMON, **_SCORED, "head_dim": 16, "use_qk_norm": True},
    "exaone_moe": {
        **_COMMON,
        **_SCORED,
        "head_dim": 8,
        "num_experts": 6,
        "n_group": 1,
        "topk_group": 1,
        "num_shared_experts": 2,
        "sliding_window": 9,
        "layer_types": _KINDS,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "solar_open": {**_COMMON, **_SCORED, "head_dim": 8, "norm_topk_prob": False},
    "ernie4_5_moe": {
        **_COMMON,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "use_bias": True,
    },
}

ARCHITECTURES |= {
    "hunyuan_v1_moe": {**_COMMON, "head_dim": 8, "num_experts": 5, "moe_topk": 2},
    "mellum": {
        **_COMMON,
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "sliding_window": 9,
        "layer_types": _KINDS,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "hy_v3": {
        **_COMMON,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "num_shared_experts": 2,
    },
    "minimax_m2": {**_COMMON, **_EXPERTS, "head_dim": 16, "rotary_dim": 8},
    "afmoe": {
        **_COMMON,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "route_scale": 1.7,
        "sliding_window": 9,
        "layer_types": _KINDS,
        "mup_enabled": True,
    },
    "cohere2_moe": {
        **_COMMON,
        "head_dim": 8,
        "num_experts": 5,
        "num_shared_experts": 2,
        "sliding_window": 9,
        "layer_types": _KINDS,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 40,
    },
}

_FOUR: dict[str, Any] = dict(num_hidden_layers=4, sliding_window=9, layer_types=_KINDS * 2, head_dim=8)
_OWN: dict[str, Any] = dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=V)
ARCHITECTURES |= {
    "gemma4_text": {
        **_COMMON,
        **_FOUR,
        **_OWN,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    "gemma3n_text": {
        **_COMMON,
        **_FOUR,
        **_OWN,
        "vocab_size_per_layer_input": 40,
        "intermediate_size": [48, 40, 48, 40],
        "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0],
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "altup_num_inputs": 3,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_unified_text": {
        **_COMMON,
        "sliding_window": 9,
        "layer_types": _KINDS,
        "head_dim": 8,
        "global_head_dim": 16,
    },
    "gemma4_moe": {
        **_COMMON,
        **_FOUR,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}

_LATENTS: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=24
)
# no two keys have equal scores, of which any may be chosen: with many heads, and without an embedding of zeros
_INDEXERS: dict[str, Any] = dict(index_n_heads=16, index_head_dim=16, index_topk=5, pad_token_id=None)
ARCHITECTURES |= {
    "deepseek_v2": {
        **_COMMON,
        **_LATENTS,
        **_SCORED,
        "num_experts": 8,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**_COMMON, **_LATENTS, **_SCORED},
    "glm4_moe_lite": {**_COMMON, **_LATENTS, **_SCORED, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v32": {**_COMMON, **_LATENTS, **_SCORED, **_INDEXERS},
    "glm_moe_dsa": {**_COMMON, **_LATENTS, **_SCORED, **_INDEXERS, "indexer_types": ["full", "shared"]},
    "youtu": {**_COMMON, **_LATENTS, "initializer_range": 0.02},
    "minicpm3": {**_COMMON, **_LATENTS, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 20},
}

# Models with recurrent or convolutional state, which score chains.
_THREE = {**_COMMON, "num_hidden_layers": 3}
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_CONV = ["conv", "full_attention", "conv"]
_DELTA = dict(
    layer_types=_LINEAR, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, head_dim=8,
)  # fmt: skip
_SPARSE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=8)
_STEP = 1e-6  # transformers lengthens time steps to a least one in passes of several tokens only: here, none is shorter
_ONE = dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
_LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_group=1,
    topk_group=1, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, pad_token_id=0,
    eos_token_id=None, layer_types=_LINEAR, mlp_layer_types=["dense", "sparse", "sparse"],
)  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**_THREE, **_DELTA},
    "qwen3_5_moe_text": {**_THREE, **_DELTA, **_SPARSE},
    "qwen3_next": {**_THREE, **_DELTA, **_SPARSE},
    "olmo_hybrid": {**_THREE, **{k: v for k, v in _DELTA.items() if k != "head_dim"}, "linear_num_value_heads": 2},
    "lfm2": {**_THREE, "layer_types": _CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        **_THREE, "layer_types": _CONV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "num_dense_layers": 1,
    },
    "lfm3": {**_THREE, "layer_types": ["conv", "full_attention", "sliding_attention"], "head_dim": 8,
             "sliding_window": 9},
    "granitemoehybrid": {**_THREE, **_MAMBA, "layer_types": _LINEAR, "shared_intermediate_size": 24,
                         "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    "falcon_h1": {  # factors default to 1, which would hide a missing one
        **_COMMON, **_MAMBA, "mamba_d_ssm": 64, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.7,
        "mlp_multipliers": [1.5, 0.8], "key_multiplier": 1.3, "attention_out_multiplier": 0.9,
        "attention_in_multiplier": 1.2, "ssm_multipliers": [0.5, 1.5, 0.7, 1.25, 0.6], "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 1.1,
    },
    "bamba": {**_THREE, **_MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {**_COMMON, "num_hidden_layers": 4, "head_dim": 8,
                   "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
                   "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
                   "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
                   "time_step_min": _STEP},
    "zamba2": {**_NO_GQA, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
               "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 8, "use_mem_rope": True,
               "use_shared_attention_adapter": True, "adapter_rank": 8, "time_step_min": _STEP},
    "mamba2": {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
               "state_size": 8, "n_groups": 2, "chunk_size": 8, "bos_token_id": 1, "eos_token_id": None,
               "pad_token_id": 0},
    "minimax": {  # factors default to 1, which would hide a missing one; decays of a prompt in blocks of five
        **_THREE, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "head_dim": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 5, "linear_attn_alpha_factor": 0.9,
        "linear_attn_beta_factor": 1.3, "full_attn_alpha_factor": 1.2, "full_attn_beta_factor": 0.8,
        "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.7,
    },
    "mamba": {**_ONE, "state_size": 8, "time_step_scale": 0.1},
    "falcon_mamba": {**_ONE, "state_size": 16},
    "jamba": {**_THREE, "mamba_d_state": 8, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
              "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "zamba": {**_NO_GQA, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
              "num_key_value_heads": 4, "mamba_d_state": 16, "initializer_range": 0.035},  # or states hardly matter
    "recurrent_gemma": {**_COMMON, "num_hidden_layers": 3, "block_types": ["recurrent", "attention", "recurrent"],
                        "intermediate_size": 96, "attention_window_size": 9},
    "rwkv": {**_ONE, "num_hidden_layers": 3, "intermediate_size": 64, "rescale_every": 2},
    "zaya": {**_COMMON},
    "kimi_linear": {**_THREE, **_LATENT, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**_THREE, **_LATENT, "head_dim": 8},
}  # fmt: skip

# Decoders of encoder-decoders by themselves, whose positions count padding. Their encoders' layers are none of theirs.
_DECODER: dict[str, Any] = dict(
    vocab_size=V, d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
    eos_token_id=None, decoder_start_token_id=2, forced_eos_token_id=None, init_std=0.1,
)  # fmt: skip
COUNTING: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "mbart", "pegasus", "plbart", "blenderbot", "blenderbot-small", "marian"), _DECODER),
    **dict.fromkeys(("mvp", "bigbird_pegasus", "trocr"), _DECODER),
    "whisper": {
        **{k: v for k, v in _DECODER.items() if k != "max_position_embeddings"},
        "max_target_positions": 128,
        "max_source_positions": 16,
        "num_mel_bins": 8,
    },
}
COMPILED_ALONE = RESTARTING | STATES_OUTSIDE  # their own forward does not continue from a state as chains need it
UNSHARPENED = "A_log", "dt_proj_bias", "_mix_key", "_mix_value", "_mix_receptance"  # how fast states change, and shares

# Text models that exist only inside a vision model: the type of that model.
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
INSIDE = {
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "glm4v_text": "glm4v",
    "glm_ocr_text": "glm_ocr",
    "glm4v_moe_text": "glm4v_moe",
    "paddleocr_vl_text": "paddleocr_vl",
    "granite_docling_text": "granite_docling",
    "molmo2_text": "molmo2",
}
ARCHITECTURES |= {
    "qwen2_vl_text": {**_COMMON, "rope_parameters": _MROPE},
    "qwen2_5_vl_text": {**_COMMON, "rope_parameters": _MROPE},
    "qwen3_vl_text": {**_COMMON, "head_dim": 8, "rope_parameters": _MROPE},
    "qwen3_vl_moe_text": {**ARCHITECTURES["qwen3_moe"], "rope_parameters": _MROPE},
    "glm4v_text": {**_COMMON, "rope_parameters": _MROPE},
    "glm_ocr_text": {**_COMMON, "head_dim": 16, "rope_parameters": {**_MROPE, "mrope_section": [3, 2, 3]}},
    "glm4v_moe_text": {**ARCHITECTURES["glm4_moe"], "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}},
    "paddleocr_vl_text": {**_COMMON, "head_dim": 8, "use_bias": True, "rope_parameters": _MROPE},
}
del ARCHITECTURES["glm4v_moe_text"]["use_qk_norm"]
_VISION = dict(depth=1, hidden_size=16, embed_dim=16, num_heads=2, intermediate_size=16, num_position_embeddings=16)
_IMAGES: dict[str, Any] = dict(vision_config=_VISION, image_token_id=2, video_token_id=2)
_TALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
_HEADS = dict(num_key_value_heads=2, head_dim=8)
BESIDE: dict[str, dict[str, Any]] = {  # the other parts of models with a text model, where they differ from the usual
    "molmo2": dict(
        vision_config={**_TALL, **_HEADS, "image_size": [28, 28], "num_position_embeddings": 4},
        adapter_config={**_TALL, **_HEADS, "vision_feature_layer": [1, 0], "text_hidden_size": 32},
    ),
    "granite_docling": dict(vision_config={**_TALL, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}),
}
ARCHITECTURES |= {
    "emu3_text_model": {**_COMMON, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "phi4_multimodal": {
        **_COMMON,
        "original_max_position_embeddings": 128,
        "vision_config": {**_TALL, "image_size": 28, "crop_size": 28},
        "audio_config": {
            **_TALL,
            "num_blocks": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
        },
    },
    "granite_docling_text": _GRANITE,
    "molmo2_text": {
        **_COMMON,
        "head_dim": 8,
        "additional_vocab_size": 8,
        "rope_scaling_layers": [0],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "xglm": dict(
        vocab_size=V,
        d_model=32,
        num_layers=2,
        attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "biogpt": _NO_GQA,
    "kolibri1": {
        **{k: v for k, v in _COMMON.items() if k != "intermediate_size"},
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": True,
        "sliding_window": 9,
        "layer_types": _KINDS,
    },
    "flint": {
        **_COMMON,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "layer_types": [*_KINDS, _KINDS[0]],
    },
    "laguna": {
        **_COMMON,
        "head_dim": 8,
        "num_attention_heads_per_layer": [2, 6],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 1.7,
        "sliding_window": 9,
        "layer_types": _KINDS,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "aria_text": {
        **_COMMON,
        "moe_num_experts": 5,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
    },
}
CLASSES = {"emu3_text_model": Emu3ForCausalLM}  # of text models that no table of classes has by their configurations

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 3.0, 5.0, 7.0],
    "original_max_position_embeddings": 40,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
ARCHITECTURES |= {
    "phi3_longrope": {**_COMMON, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 40},
    "llama_longrope": {**_COMMON, "rope_parameters": _LONGROPE},
    "llama_dynamic": {**_COMMON, "rope_parameters": _DYNAMIC},
}
TYPES = {  # architectures that are a kind of a model type
    "falcon_alibi": "falcon",
    "gemma4_moe": "gemma4_text",
    "phi3_longrope": "phi3",
    "llama_longrope": "llama",
    "llama_dynamic": "llama",
}

VARIANTS = {"gemma4_moe"}  # of a type with a program, whose configurations have little in common
# layers read the keys and values of others, or what their indexers choose, so that none can be skipped
SHARING = {"gemma3n_text", "gemma4_text", "glm_moe_dsa"}
BY_TOKEN = {
    "gemma3n_text",
    "gemma4_text",
}  # layers have embeddings of their own of each token, so that none can be given
STREAMS = {"gemma3n_text"}  # layers have several hidden states of each token, which are not tapped
# in bf16, of the spread of the logits: scores of normalised queries are not scaled, so that attention is sharp
ROUGH = {"gemma4_text": 0.2, "gemma4_moe": 0.2, "gemma4_unified_text": 0.2}

# torch multiplies grouped matrices (experts) in fp32 and below only; in fp64, transformers' own eager attention over a
# left-padded window (Gemma 2) deviates from its output for the same prompt alone; the mask of BLOOM overflows in fp32,
# in which the softmax is
NO_FP64 = {"bloom", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "olmoe", "phimoe", "gemma2"}
NO_FP64 |= {"mpt", "gpt_neo"}  # attention in fp32
NO_FP64 |= {"granitemoe", "granitemoeshared", "flex_olmo", "gpt_oss"}
NO_FP64 |= {"dots1", "glm4_moe", "solar_open", "ernie4_5_moe", "granitemoe_swa", "exaone_moe"}
NO_FP64 |= {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"}
NO_FP64 |= {"gemma4_moe", "hunyuan_v1_moe", "mellum", "hy_v3", "minimax_m2", "afmoe", "cohere2_moe"}
NO_FP64 |= {"aria_text", "glm4v_moe_text", "kolibri1", "flint", "laguna", "xglm"}
NO_FP64 |= {"granite_swa", "vaultgemma"}  # NaN at padding by their own attention


@cache
def tiny(
    architecture: str = "llama",
    dtype: torch.dtype = torch.float64,
    sharpen: float = 3.0,
    vocabulary: int = V,
    attention: str | None = None,
    layers: int | None = None,
) -> PreTrainedModel:
    """A model of an architecture with random weights, the matrices multiplied by `sharpen`."""
    torch.manual_seed(7)
    text = {**(ARCHITECTURES | RECURRENT | COUNTING)[architecture], "vocab_size": vocabulary}
    if layers is not None:
        text[next(name for name in ("n_layer", "n_layers", "num_layers", "num_hidden_layers") if name in text)] = layers
        if "attention_types" in text:
            text["attention_types"] = [[[("local", "global")[i % 2]], 1] for i in range(layers)]
        if "num_kv_shared_layers" in text:
            text["num_kv_shared_layers"] = max(0, layers - 2)
        for name in PER_LAYER & text.keys():
            text[name] = (text[name] * layers)[:layers] if isinstance(text[name], list) else text[name]
    if (whole := INSIDE.get(architecture)) is not None:
        config = CONFIG_MAPPING[whole](text_config=text, **BESIDE.get(whole, _IMAGES))
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention).eval()
    else:
        config = CONFIG_MAPPING[TYPES.get(architecture, architecture)](**text)
        make = CLASSES[architecture]._from_config if architecture in CLASSES else AutoModelForCausalLM.from_config
        model = make(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and name.endswith("weight") and not parameter.any():  # or any expert may be chosen
                parameter.normal_(std=0.02)
            if parameter.ndim >= 2 and not name.endswith(UNSHARPENED):
                parameter.mul_(sharpen)
            elif name.endswith("correct_output_scale"):  # zeros, which would hide what is scaled
                parameter.normal_(1.0, 0.3)
    return model.to(dtype)


def tapped(architecture: str, *layers: int) -> tuple[int, ...]:
    """The layers, where those of an architecture can be tapped."""
    return () if architecture in STREAMS else layers


def ragged(model: PreTrainedModel, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, left-padded, or of one length where padding would be read as text, or one alone
    where rows would read each other; each with a repeated phrase, so that lookup drafters match."""
    rows = 1 if model.config.model_type in MIXING_ROWS else rows
    g = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    phrases = torch.randint(3, vocabulary, (rows, 6), generator=g).tolist()
    same = model.config.model_type in STATES_OUTSIDE
    prompts = [(p * 3)[: 5 + 3 * (rows if same else i)] for i, p in enumerate(phrases)]
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


def sibling(model: PreTrainedModel, spread: float = 0.06) -> PreTrainedModel:
    """A model that often agrees with another: its weights with relative noise of standard deviation `spread`."""
    if (id(model), spread) not in _SIBLINGS:
        other = copy.deepcopy(model)
        g = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1 + spread * torch.randn(parameter.shape, generator=g, dtype=torch.float32))
        _SIBLINGS[id(model), spread] = (model, other)
    return _SIBLINGS[id(model), spread][1]


_SIBLINGS: dict[
    tuple[int, float], tuple[PreTrainedModel, PreTrainedModel]
] = {}  # keeps the model alive, so that its id is not reused
