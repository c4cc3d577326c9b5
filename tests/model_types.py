"""Every model type of the installed `transformers` that continues text, built tiny with random weights.

Configurations are shrunk by the names of their numbers, sub-configurations too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

V = 97
MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")

# What a number of a configuration becomes, where it is larger, by the first pattern that its name matches.
SIZES = {
    r".*vocab(ulary)?(_size.*)?": V,
    r".*(key_value|kv)_heads|num_attention_groups|multi_query_group_num|.*n_head_kv|num_query_groups": 2,
    r".*heads?_dim.*|.*_head_size|d_kv|d_head|kv_channels|attention_key_size|dim_head": 8,
    r".*heads?": 4,
    r".*layers.*|.*blocks|depth|n_layers?": 2,
    r".*experts_per_tok.*|.*top_?k.*": 2,
    r"n(um)?_group": 1,
    r".*experts.*": 4,
    r".*(intermediate|ffn|mlp|inner)(_hidden)?_(size|dim)|d_ff|d_inner|n_inner|dim_ff": 48,
    r"d_model|n_embd|(.*_)?dim|dim_model|.*(hidden|embed|embedding|emb|output|projection).*_(size|dim)|word_embed_proj_dim": 32,
    r".*position_embeddings|n_positions|max_seq_len.*|n_ctx": 256,
    r"sliding_window|attention_window": 9,
}


def classes() -> list[tuple[str, str]]:
    """(model type, name of the class) of all that a mapping of language models names."""
    found: dict[tuple[str, str], None] = {}
    for mapping in MAPPINGS:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found[kind, name] = None
    return sorted(found)


def shrunk(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with small numbers; of what there is for each layer, that of two layers of different kinds."""
    count = next((given[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if given.get(n)), 0)
    kinds = given.get("layer_types") or given.get("layers_block_type") or [0] * count
    kept = [0, next((i for i, kind in enumerate(kinds) if kind != kinds[0]), count - 1)]
    return {name: _small(name, value, count, kept) for name, value in given.items()}


def _small(name: str, value: Any, count: int, kept: list[int]) -> Any:
    if isinstance(value, dict) and value and all(isinstance(key, int) or str(key).isdigit() for key in value):
        return {new: value.get(old, value.get(str(old))) for new, old in enumerate(kept) if old in value or str(old) in value}
    if isinstance(value, dict):
        return shrunk(value)
    if isinstance(value, list | tuple) and len(value) == count > 2:
        return [_small(name, value[i], count, kept) for i in kept]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.fullmatch(r".*_token_(id|index)|.*_token", name):
        return min(value, V - 1)
    return min(value, next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), value))


def built(kind: str, name: str) -> PreTrainedModel:
    """A tiny model of a class, with large random weights so that it does not babble one token."""
    torch.manual_seed(7)
    config = CONFIG_MAPPING[kind]()
    config = type(config).from_dict(shrunk(config.to_dict()))
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model
