"""EAGLE-1, EAGLE-2 and HASS: `fc` of (embedding, feature) and one decoder layer; the target's head; arXiv 2401.15077.

A feature is the target's state after the final norm; feature i is paired with token i + 1. The layer has no norm before
its attention, and none follows it: its output is the next feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, PreTrainedModel

from foreign import Foreign
from foreign.common import (
    Draws,
    along,
    attention_weights,
    causal,
    embedding,
    features,
    head,
    mlp,
    mlp_weights,
    opened,
    save,
    under,
)


def write_eagle1(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    bias: bool | None = None,
    qkv_bias: bool = False,
    embedded: str = "copy",
    prefix: str = "",
    file: str = "pytorch_model.bin",
) -> Path:
    """bias: of the configuration (None: no key, which means true). embedded: "copy" of the target's embeddings, "own"
    ones, or "absent". prefix: before every name."""
    draws, shape = Draws(seed), target.config
    settings: dict[str, Any] = dict(hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, num_hidden_layers=1)
    settings |= dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=56, rms_norm_eps=1e-3)
    config = CONFIG_MAPPING["llama"](**settings)
    weights = {"fc.weight": draws("fc", shape.hidden_size, 2 * shape.hidden_size)}
    if bias is not False:
        weights["fc.bias"] = draws("fc.bias", shape.hidden_size)
    if embedded != "absent":
        own = embedded == "own"
        weights["embed_tokens.weight"] = draws("embed", *embedding(target).shape) if own else embedding(target).float()
    weights |= under("layers.0.", attention_weights(draws, "", config, shape.hidden_size, "qkv" if qkv_bias else ""))
    weights |= under("layers.0.", mlp_weights(draws, "", config))
    settings |= dict(architectures=["LlamaForCausalLM"], model_type="llama", rope_theta=500.0, hidden_act="silu")
    settings |= ({} if bias is None else {"bias": bias}) | ({"qkv_bias": True} if qkv_bias else {})
    return save(folder, settings, under(prefix, weights), file)


def eagle1_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    settings, weights = opened(folder, target.dtype)
    weights = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    config = CONFIG_MAPPING["llama"](**{k: v for k, v in settings.items() if k != "architectures"})
    table = weights.get("embed_tokens.weight", embedding(target))
    bias = weights.get("fc.bias") if settings.get("bias", True) and wrong != "bias of fc left out" else None

    def own(states: Tensor, later: list[int]) -> tuple[Tensor, Tensor]:
        pair = [table[later], states]
        x = F.linear(torch.cat(pair[::-1] if wrong == "feature first" else pair, dim=-1), weights["fc.weight"], bias)
        x = mlp(x + causal(x, weights, "layers.0.", config), weights, "layers.0.", config)
        return F.linear(x[-1], head(target)), x[-1]

    true = features(target, tokens, [len(target.get_decoder().layers) if wrong == "feature before the norm" else -1])
    later = shifted([*tokens, *drafted], wrong)
    return along(own, true, later)


def shifted(sequence: list[int], wrong: str) -> list[int]:
    """The tokens paired with the features: those one after them, or by a wrong shift (the last one repeated)."""
    shift = {"tokens not shifted": 0, "tokens shifted by two": 2}.get(wrong, 1)
    return (sequence + sequence[-1:])[shift:][: len(sequence) - 1]


PAIRS = ("feature first", "tokens not shifted", "tokens shifted by two")
FORMATS = [
    Foreign(
        "eagle",
        write_eagle1,
        eagle1_logits,
        "recurrent",
        variants={
            "published": {},
            "bias": dict(bias=True, file="model.safetensors"),
            "no bias": dict(bias=False),
            "bias of queries": dict(qkv_bias=True, bias=True),
            "own embeddings": dict(embedded="own"),
            "no embeddings": dict(embedded="absent", file="model.safetensors"),
            "prefix": dict(prefix="model.", file="model.safetensors"),
        },
        controls={wrong: {} for wrong in (*PAIRS, "feature before the norm", "bias of fc left out")},
        file="pytorch_model.bin",
    )
]
