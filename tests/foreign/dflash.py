"""DFlash: a block of mask tokens after the pending one is filled in by one pass; arXiv 2602.06036.

The context, hidden_norm(fc(features)), enters every layer beside the block as keys and values, without the layer's
input norm; the block sees all of it and all of itself. Slot j drafts the token at its own position, slot 0 none; with
`sample_from_anchor` slot j drafts the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from foreign import Foreign
from foreign.common import (
    Draws,
    Weights,
    attention,
    attention_weights,
    draft_vocabulary,
    embedding,
    features,
    head,
    mlp,
    mlp_weights,
    opened,
    rms_norm,
    save,
    scattered,
    under,
)
from foreign.eagle3 import LAYER, speculators_config

BLOCK, MASK = 5, 96


def write_dflash(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    layers: int = 2,
    ids: Sequence[int] | None = (1, 3, 6),
    nested: bool = False,
    causal: bool = False,
) -> Path:
    """The layout of z-lab. ids: blocks whose output is read; None leaves the key out. nested: `block_size` within
    `dflash_config`. causal: of the block."""
    settings: dict[str, Any] = _shape(target, layers) | dict(architectures=["DFlashDraftModel"], model_type="qwen3")
    count = len(ids or range(layers))
    own: dict[str, Any] = {"mask_token_id": MASK} | ({} if ids is None else {"target_layer_ids": list(ids)})
    own |= ({"block_size": BLOCK} if nested else {}) | ({"causal": True} if causal else {})
    settings |= dict(num_target_layers=target.config.num_hidden_layers, dflash_config=own)
    settings |= {} if nested else {"block_size": BLOCK}
    return save(folder, settings, _weights(Draws(seed), target, layers, count), "model.safetensors")


def write_dflash_speculators(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    layers: int = 2,
    ids: Sequence[int] = (2, 4, 8),
    draft_vocab: int | None = 41,
    sample_from_anchor: bool = False,
    own_embeddings: bool = False,
) -> Path:
    """ids: layers of the target, its number of blocks for the last one's output before the final norm."""
    draws, vocabulary, width = Draws(seed), target.config.vocab_size, target.config.hidden_size
    settings = dict(
        architectures=["DFlashSpeculator"],
        speculators_model_type="dflash",
        speculators_version="0.5.0",
        draft_vocab_size=draft_vocab or vocabulary,
        block_size=BLOCK,
        target_hidden_size=None,
        aux_hidden_state_layer_ids=list(ids),
        mask_token_id=MASK,
        sliding_window_non_causal=False,
        sample_from_anchor=sample_from_anchor,
        transformer_layer_config=CONFIG_MAPPING["qwen3"](**_shape(target, layers)).to_diff_dict(),
        speculators_config=speculators_config("dflash", BLOCK if sample_from_anchor else BLOCK - 1),
    )
    weights = _weights(draws, target, layers, len(ids))
    table = draws("embed", vocabulary, width) if own_embeddings else embedding(target).float()
    weights |= {"embed_tokens.weight": table, "lm_head.weight": draws("lm_head", draft_vocab or vocabulary, width)}
    if draft_vocab:
        weights["d2t"], weights["t2d"] = draft_vocabulary(draws, draft_vocab, vocabulary)
    return save(folder, settings, weights, "model.safetensors")


def _shape(target: PreTrainedModel, layers: int) -> dict[str, Any]:
    shape = dict(hidden_size=target.config.hidden_size, vocab_size=target.config.vocab_size, num_hidden_layers=layers)
    return shape | LAYER | dict(rope_theta=500.0, layer_types=["full_attention"] * layers, hidden_act="silu")


def _weights(draws: Draws, target: PreTrainedModel, layers: int, count: int) -> Weights:
    config = CONFIG_MAPPING["qwen3"](**_shape(target, layers))
    width = config.hidden_size
    found = {f"{name}.weight": draws.norm(name, width) for name in ("hidden_norm", "norm")}
    found["fc.weight"] = draws("fc", width, count * target.config.hidden_size)
    for at in range(layers):
        own = attention_weights(draws, f"{at}.", config, width, qk_norm=True) | mlp_weights(draws, f"{at}.", config)
        own["input_layernorm.weight"] = draws.norm(f"{at}.input", width)
        found |= under(f"layers.{at}.", own)
    return found


def dflash_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    """Of both layouts. The block always has the published size, however few of its slots are read."""
    settings, weights = opened(folder, target.dtype)
    nested = settings.get("transformer_layer_config", settings)
    config = CONFIG_MAPPING["qwen3"](**{k: v for k, v in nested.items() if k not in ("architectures", "model_type")})
    own = settings.get("dflash_config", settings)
    size = settings.get("block_size") or own["block_size"]
    layers = feature_layers(settings, config.num_hidden_layers, len(target.get_decoder().layers))
    layers = [at + 1 for at in layers] if wrong == "layers one later" else layers
    layers = [at - 1 for at in layers] if wrong == "layers one earlier" else layers
    layers = [-1 if at == 8 else at for at in layers] if wrong == "last block after the norm" else layers
    context = F.linear(features(target, tokens, layers), weights["fc.weight"])
    context = rms_norm(context, weights["hidden_norm.weight"], config.rms_norm_eps)
    ids = [tokens[-1]] + [own["mask_token_id"]] * (size - 1)
    table = None if wrong == "embeddings of the target" else weights.get("embed_tokens.weight")
    x = (embedding(target) if table is None else table)[ids]
    seen = torch.ones(size, len(context) + size, dtype=torch.bool)
    if own.get("causal", False) ^ (wrong == "other direction of the block"):
        seen = seen.tril(len(context))
    for at in range(config.num_hidden_layers):
        x = _layer(x, context, weights, f"layers.{at}.", config, seen, wrong)
    first = 0 if settings.get("sample_from_anchor", False) ^ (wrong == "other slots") else 1
    x = rms_norm(x, weights["norm.weight"], config.rms_norm_eps)[first:][: 1 + len(drafted)]
    logits = F.linear(x, weights.get("lm_head.weight", head(target)))
    kept = torch.arange(logits.shape[1])
    if "d2t" in weights:
        kept = weights["d2t"] + (0 if wrong == "d2t as absolute ids" else kept)
    return scattered(logits, kept, target.config.vocab_size)


def _layer(
    x: Tensor, context: Tensor, weights: Weights, prefix: str, config: PretrainedConfig, seen: Tensor, wrong: str
) -> Tensor:
    def norm(y: Tensor) -> Tensor:
        return rms_norm(y, weights[f"{prefix}input_layernorm.weight"], config.rms_norm_eps)

    y = norm(x)
    keys = torch.cat([norm(context) if wrong == "context through the input norm" else context, y])
    x = x + attention(y, keys, weights, f"{prefix}self_attn.", config, len(context), seen)
    return mlp(x, weights, prefix, config)


def feature_layers(settings: dict[str, Any], layers: int, blocks: int) -> list[int]:
    """Layers as `features` counts them. speculators names layers; z-lab the blocks whose output is read, by default
    the middle one for one draft layer, else spread from the second to the third from the end."""
    if "aux_hidden_state_layer_ids" in settings:
        return settings["aux_hidden_state_layer_ids"]
    ids = settings["dflash_config"].get("target_layer_ids")
    if ids is None and layers == 1:
        ids = [blocks // 2]
    elif ids is None:
        ids = [round(1 + i * (blocks - 4) / (layers - 1)) for i in range(layers)]
    return [at + 1 for at in ids]


WRONG = ("layers one earlier", "context through the input norm", "other direction of the block", "other slots")
FORMATS = [
    Foreign(
        "dflash",
        write_dflash,
        dflash_logits,
        "parallel",
        variants={
            "published": {},
            "default layers": dict(ids=None, layers=3),
            "one layer": dict(ids=None, layers=1),
            "nested block size": dict(nested=True),
            "causal": dict(causal=True),
        },
        controls={wrong: {} for wrong in (*WRONG, "layers one later")},
        rows=BLOCK - 1,
    ),
    Foreign(
        "dflash-speculators",
        write_dflash_speculators,
        dflash_logits,
        "parallel",
        variants={
            "published": {},
            "whole vocabulary": dict(draft_vocab=None),
            "own embeddings": dict(own_embeddings=True),
            "from the anchor": dict(sample_from_anchor=True),
            "five layers": dict(ids=(1, 2, 3, 5, 7), layers=3),
        },
        controls={wrong: {} for wrong in (*WRONG, "d2t as absolute ids", "last block after the norm")}
        | {"layers one later": dict(ids=(2, 4, 7)), "embeddings of the target": dict(own_embeddings=True)},
        rows=BLOCK - 1,
    ),
]
