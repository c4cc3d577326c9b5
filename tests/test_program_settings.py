"""What configurations can switch on, by the compiled pass: computed as they say, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import models
from truedraft import DraftTree
from truedraft.runtime import native
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.hostable import keeps_states
from truedraft.targets.recurrent import RecurrentTarget
from truedraft.tree import Prompt
from whole import Whole

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True}),
    ("qwen3_next", {"mlp_only_layers": [1], "linear_num_key_heads": 4}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False, "rope_parameters": None}),
    ("mamba2", {"use_bias": True, "residual_in_fp32": False, "n_groups": 1}),
    ("mamba", {"use_bias": True, "residual_in_fp32": False, "use_conv_bias": False, "time_step_rank": 5}),
    ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "num_experts": 1}),
    ("zamba", {"mamba_proj_bias": True, "n_mamba_heads": 1}),
    ("recurrent_gemma", {"attention_bias": True, "num_key_value_heads": 1, "lru_width": 64, "conv1d_width": 3}),
    ("rwkv", {"rescale_every": 0, "tie_word_embeddings": True}),
    ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": None}),
    ("bamba", {"mamba_proj_bias": True, "mlp_bias": True, "attention_bias": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    ("nemotron_h", {"use_bias": True, "mlp_bias": True, "norm_topk_prob": False}),
    ("phimoe", {"lm_head_bias": True, "attention_bias": True, "router_jitter_noise": 0.4}),
    ("cohere2_moe", {"num_shared_experts": 0, "rms_norm_eps": 1e-5}),
    ("cohere2_moe", {"shared_expert_combination_strategy": "sum", "prefix_dense_sliding_window_pattern": 2}),
    ("hunyuan_v1_moe", {"moe_topk": [1, 3], "attention_bias": True}),
    ("afmoe", {"mup_enabled": False, "num_dense_layers": 0}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_double_wide_mlp": False}),
    ("gemma4_text", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_bias": True}),
    ("zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False, "num_mem_blocks": 2}),
    ("llama4_text", {"use_qk_norm": False, "attention_bias": True, "num_experts_per_tok": 1}),
    ("llama4_text", {"floor_scale": 5, "attn_scale": 0.5, "interleave_moe_layer_step": 2, "moe_layers": None}),
    ("llama4_text", {"attn_temperature_tuning": False, "floor_scale": 5}),
    ("gemma3n_text", {"altup_correct_scale": False, "num_kv_shared_layers": 0, "attention_bias": True}),
    ("gemma3n_text", {"altup_num_inputs": 4, "vocab_size_per_layer_input": models.V}),
    ("bloom", {"apply_residual_connection_post_layernorm": True, "pretraining_tp": 2, "n_head": 2}),
    ("gpt_neo", {"attention_types": [[["global"], 2]], "activation_function": "relu"}),
    ("aria_text", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    ("phi4_multimodal", {"sliding_window": 9}),
    ("kolibri1", {"norm_topk_prob": False}),
    ("flint", {"norm_topk_prob": False, "attention_bias": True, "decoder_sparse_step": 2}),
    ("laguna", {"gating": "per-element", "attention_bias": True}),
    ("xglm", {"scale_embedding": False, "activation_function": "relu"}),
    ("biogpt", {"scale_embedding": False, "hidden_act": "relu"}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("falcon_h1", {"mamba_rms_norm": True}, "normalised before they are gated"),
    ("mamba2", {"time_step_limit": (0.0, 0.5)}, r"time steps are limited to 0.0 to 0.5"),
    ("zamba", {"mamba_d_state": 8}, "not a multiple of sixteen"),
    ("mamba", {"hidden_size": 34}, "68 numbers"),
    ("recurrent_gemma", {"num_attention_heads": 8, "num_key_value_heads": 8}, "heads of 4"),
    ("rwkv", {"hidden_size": 36}, "36 channels"),
    ("nemotron_h", {"time_step_min": 0.1}, "time steps are limited to 0.1"),
    ("nemotron_h", {"n_group": 2}, "chosen by groups"),
    ("nemotron_h", {"moe_latent_size": 16}, "not of the sizes of its router"),
    ("lfm3", {"conv_L_cache": 9}, "over 9 inputs"),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid"}, "chosen by a sigmoid"),
    ("gemma4_text", {"vocab_size_per_layer_input": 40}, "embeddings of fewer tokens"),
    ("gemma4_text", {"hidden_size_per_layer_input": 8}, "8 numbers, not a multiple of sixteen"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "attend to later ones"),
    ("gemma3n_text", {"altup_active_idx": 1}, "do not compute the first of its hidden states"),
    ("laguna", {"moe_router_logit_softcapping": 5.0}, "scores of its experts are capped"),
    ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}, "multiplies weights by parts"),
]


def made(architecture: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A model of an architecture as the tests have it, but for some of its configuration; no weight is one or zero."""
    torch.manual_seed(7)
    settings = (models.ARCHITECTURES | models.RECURRENT)[architecture]
    config = CONFIG_MAPPING[architecture](**{**settings, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith(models.UNSHARPENED):
                parameter.mul_(3.0)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def target_of(model: PreTrainedModel, runtime: str) -> Any:
    if runtime == "stock" and model.config.model_type in models.COMPILED_ALONE:
        return Whole(model)
    kind = RecurrentTarget if keeps_states(model.config) else DecoderTarget
    return kind(model, runtime, strict=runtime == "auto")


@pytest.mark.parametrize(("architecture", "changes"), COMPUTED, ids=[name for name, _ in COMPUTED])
def test_logits_are_those_of_the_forward(architecture: str, changes: dict[str, Any]) -> None:
    model, found = made(architecture, changes), []
    for runtime in ("auto", "stock"):
        target = target_of(model, runtime)
        assert runtime == "stock" or target.fallback_reason is None
        target.reserve(1, 64)
        read = target.prefill([Prompt(torch.arange(5, 24))]).logits
        target.commit([[0]])
        found.append([read, target.score([DraftTree.chain(9, [3, 4, 8])]).logits])
    for compiled, stock in zip(*found, strict=True):
        assert (compiled - stock).abs().max() < 2e-5 * stock.std()


@pytest.mark.parametrize(("architecture", "changes", "why"), REFUSED)
def test_what_programs_do_not_compute_is_refused(architecture: str, changes: dict[str, Any], why: str) -> None:
    reason = target_of(made(architecture, changes), "auto").fallback_reason
    assert reason is not None and re.search(why, reason)
