"""Every model type of the installed `transformers` that continues text, built tiny, and its outcome: hosted with the
tokens of `model.generate`, greedy and sampled, in a batch of two lengths, or refused in one sentence.

Configurations, and those inside them, are shrunk by the names of their fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

import truedraft
from truedraft import Refused
from truedraft.loading import kind_by
from truedraft.targets.quirks import STATES_OUTSIDE

V = 97
MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")

# Upper bounds of a configuration's numbers, by the first pattern that matches the name.
SIZES = {
    r".*vocab(ulary)?(_size.*)?": V,
    r".*(key_value|kv)_heads|num_attention_groups|multi_query_group_num|.*n_head_kv|num_query_groups": 2,
    r".*heads?_dim.*|.*_head_size|d_kv|d_head|kv_channels|attention_key_size|dim_head|rotary_dim": 8,
    r".*heads?": 4,
    r".*layers.*|.*blocks|depth|n_layers?": 2,
    r".*experts_per_tok.*|.*top_?k.*|moe_k": 2,
    r"n(um)?_group": 1,
    r".*experts.*": 4,
    r".*(intermediate|ffn|mlp|inner)(_hidden)?_(size|dim)|d_ff|d_inner|n_inner|dim_ff": 48,
    r"d_model|n_embd|(.*_)?dim|dim_model": 32,
    r".*(hidden|embed|embedding|emb|output|projection).*_(size|dim)": 32,
    r".*position_embeddings|n_positions|max_seq_len.*|n_ctx": 256,
    r"attention_window": 8,
    r"sliding_window": 9,
}
_HEADS = {"head_dim": 8}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2}
_GROUPS = {"num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2}
_INDEXERS = {
    "index_n_heads": 16,
    "index_topk": 5,
}  # of fewer heads, many keys have equal scores, of which any is chosen
_NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8}
_MROPE = {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}}
# Further settings that some model types need.
FURTHER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glmga", "glm_ocr", "paddleocr_vl"), _MROPE),
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 0]}}},
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"), _HEADS),
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48},
    "codegen": {"n_embd": 64},
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"]}},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "nemotron_h": _NEMOTRON,
    "nemotron_h_omni": {"text_config": _NEMOTRON},
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "hybrid_layer_ids": [1],
    },
    **dict.fromkeys(("axk2", "glm_moe_dsa", "hy_v4"), _INDEXERS),
    "deepseek_v32": {**_INDEXERS, "topk_group": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {
        "layers_block_type": ["hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "kimi_linear": _GROUPS,
    "bailing_hybrid": _GROUPS,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
}

# Outcome -> heading of its section on the page, and lines below it.
SECTIONS: dict[str, tuple[str, list[str]]] = {
    "compiled": ("By the compiled pass", []),
    "own forward": ("By the model's own forward", []),
    "another way": (
        "Not from left to right",
        ["Diffusion and any-subset models: see [canvas.md](canvas.md).", ""],
    ),
    "refused": ("Refused", []),
    "not built": ("Not built, so not known", []),
}

# Further inputs that some model types need.
INPUTS: dict[str, dict[str, torch.Tensor]] = {"udop": {"bbox": torch.zeros(2, 9, 4)}}


def classes() -> list[tuple[str, str]]:
    """(model type, class name) of every entry of the mappings of language models."""
    found: dict[tuple[str, str], None] = {}
    for mapping in MAPPINGS:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found[kind, name] = None
    return sorted(found)


def shrunk(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with small numbers; of per-layer settings, those of two layers of different kinds."""
    count = next((given[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if given.get(n)), 0)
    kinds = given.get("layer_types") or given.get("layers_block_type") or [0] * count
    kept = [0, next((i for i, kind in enumerate(kinds) if kind != kinds[0]), count - 1)]
    small = {name: _small(name, value, count, kept) for name, value in given.items()}
    if "kv_lora_rank" in small:  # keys are per head, expanded from the shared latent
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "is_decoder" in small:
        small["is_decoder"] = True
    return small


def _small(name: str, value: Any, count: int, kept: list[int]) -> Any:
    if isinstance(value, dict) and value and all(str(key).isdigit() and int(key) < count for key in value):
        by_layer = {int(key): entry for key, entry in value.items()}
        return {new: by_layer[old] for new, old in enumerate(kept) if old in by_layer}
    if isinstance(value, dict):
        return shrunk(value)
    if isinstance(value, list | tuple) and len(value) == count > 2:
        return [_small(name, value[i], count, kept) for i in kept]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.fullmatch(r".*_token_(id|index)|.*_token", name):
        return min(value, V - 1)
    return min(value, next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value))


def _merged(into: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in more.items():
        into[name] = _merged(dict(into.get(name) or {}), value) if isinstance(value, dict) else value
    return into


def built(kind: str, name: str) -> PreTrainedModel:
    """A tiny model of a class, with large random weights so that it does not repeat one token."""
    torch.manual_seed(7)
    cls, config = getattr(transformers, name), CONFIG_MAPPING[kind]()
    config = type(config).from_dict(_merged(shrunk(config.to_dict()), FURTHER.get(kind, {})))
    if type(config) is not cls.config_class and type(text := config.get_text_config(decoder=True)) is cls.config_class:
        config = text
    model = cls(config).eval()
    settings = getattr(model, "generation_config", None)
    for setting, token in (("bos_token_id", 1), ("pad_token_id", 0), ("decoder_start_token_id", 1)):
        if settings is not None and getattr(settings, setting) is None:
            setattr(settings, setting, token)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and name.endswith("weight") and not parameter.any():  # or any expert may be chosen
                parameter.normal_(std=0.02)
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model


def _inputs(model: Any, padded: bool) -> dict[str, torch.Tensor]:
    """Two texts, or two sounds, the first of which is shorter and padded."""
    generator = torch.Generator().manual_seed(0)
    name = model.main_input_name if model.config.is_encoder_decoder else "input_ids"
    if name == "input_ids":
        given, short = torch.randint(3, V - 8, (2, 9), generator=generator), slice(4)
    elif name == "input_values":
        given, short = torch.randn(2, 4000, generator=generator), slice(2500, None)
    else:
        channels = getattr(model.get_encoder().config, "num_mel_bins", 80)
        given, short = torch.randn(2, 64, channels, generator=generator), slice(40, None)
    mask = torch.ones(given.shape[:2], dtype=torch.long)
    if padded:
        given[0, short] = mask[0, short] = 0
    if model.config.model_type in STATES_OUTSIDE:  # their `generate` reads padding, or other rows
        given, mask = given[1:], mask[1:]
    return {name: given, "attention_mask": mask, **INPUTS.get(model.config.model_type, {})}


def _generated(model: Any, inputs: dict[str, torch.Tensor], sample: bool) -> torch.Tensor:
    torch.manual_seed(5)
    settings: dict[str, Any] = dict(max_new_tokens=10, min_new_tokens=10, do_sample=sample, num_beams=1)
    return model.generate(**inputs, **settings)


def outcome(kind: str, name: str) -> tuple[str, str]:
    """The outcome of a class: "compiled" or "own forward", with the limit of its prompts or ""; ("another way", "") of
    diffusion and any-subset models, which are not built here; ("refused", why); or ("not built", why).

    Raises:
        AssertionError: other tokens than those of the model's own `generate`.
        Exception: anything but a refusal.
    """
    if kind_by({"model_type": kind}) != "text":
        return "another way", ""
    try:
        model = built(kind, name)
    except Exception as error:
        return "not built", " ".join(f"{type(error).__name__}: {error}".split())
    try:
        fast = truedraft.accelerate(model)
        padded = fast.target.pads
        inputs = _inputs(model, padded)
        found = [_generated(fast, inputs, sample) for sample in (False, True)]
    except Refused as why:
        assert str(why) and "\n" not in str(why)
        return "refused", str(why)
    for sample, text in zip((False, True), found, strict=True):
        assert torch.equal(text, _generated(model, inputs, sample)), f"{name} gives other tokens (do_sample={sample})"
    made = "compiled" if fast.target.runtime.startswith("compiled pass") else "own forward"
    return made, "" if padded else "prompts without padding only"


def page(found: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    """docs/models.md, from the outcome of every class."""
    lines = [
        "# Models",
        "",
        f"Every class of `transformers` {transformers.__version__} that its tables of language models name, built tiny",
        "with random weights and given a batch of two texts (`python tools/models.py`; held by a slow test), or one",
        "where `generate` reads padding or other rows (RecurrentGemma, RWKV). Hosted means the tokens of",
        "`model.generate`, greedy and sampled. Models that also read images or sounds are hosted for texts, through",
        "their text part; an image or a sound is refused by the name of its argument. A model is compared with its own",
        "`generate` on your machine before it is trusted, so one of another configuration may be hosted where this one",
        "is refused, and the other way round. Where padding changes a model's text, only prompts without it are",
        "hosted.",
    ]
    for expected, (title, about) in SECTIONS.items():
        reasons: dict[str, list[str]] = {}
        for (kind, name), (outcome, why) in found.items():
            if outcome == expected:
                reasons.setdefault(_general(why), []).append(f"{name} (`{kind}`)")
        lines += ["", f"## {title} ({sum(map(len, reasons.values()))})", "", *about]
        for why, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
            lines.append(f"- {why}: {', '.join(names)}." if why else f"{', '.join(names)}.")
    return "\n".join(lines) + "\n"


def _general(why: str) -> str:
    """A reason without class name and size of a difference, so that equal reasons group."""
    why = re.sub(r"^\w+ (cannot be hosted exactly: )?", "", why)
    return re.sub(r"\d[\d.e-]* standard", "some standard", why)[:160].replace("<", "").replace("|", "")


def stated(text: str) -> dict[tuple[str, str], str]:
    """The outcome that the page gives each class."""
    sections = dict(zip(SECTIONS, text.split("\n## ")[1:], strict=True))
    return {
        (kind, name): outcome
        for outcome, section in sections.items()
        for name, kind in re.findall(r"(\w+) \(`([\w.-]+)`\)", section)
    }
