"""Hydra: heads that read the target's state and the embeddings of the drafts before them; arXiv 2402.05109.

Head i reads the state at the last processed token, the embedding of the pending token and those of i drafts, in this
order. `prefix-mlp` (Hydra++) passes the states through one decoder layer and its final norm before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from foreign import Foreign
from foreign.common import (
    Draws,
    Weights,
    attention_weights,
    embedding,
    features,
    layer,
    mlp_weights,
    opened,
    rms_norm,
    save,
    under,
)

HEADS = 4
PREFIX = "prefix_embeding_layer."


def write_hydra(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    arch: str = "mlp",
    layers: int = 1,
    aliased: bool = True,
    grounded: bool = True,
    offset: int = 0,
) -> Path:
    """arch: "mlp" or "prefix-mlp". layers: blocks of a head; those after the first are one in the published code
    (`aliased`). grounded: False leaves the embeddings out of the heads' inputs. offset: `hidden_state_offset`."""
    draws, config = Draws(seed), target.config
    width, vocabulary, prefixed = config.hidden_size, config.vocab_size, arch == "prefix-mlp"
    settings = dict(hydra_num_heads=HEADS, hydra_num_layers=layers, hydra_head_arch=arch, grounded_heads=grounded)
    settings |= dict(hidden_state_offset=offset, base_model_name_or_path="target")
    weights: Weights = {}
    for i in range(HEADS):
        inputs = (i + 2 if grounded else 1) * width
        for j in range(layers):
            role, slot = f"{i}.{min(j, 1) if aliased else j}", 2 * j + 1 if prefixed else j  # dropout at even slots
            first = grounded and j == 0
            for name in ("linear", "res_connection") if first else ("linear",):
                matrix = draws(f"{role}.{name}", width, inputs if first else width)
                own = {"weight": matrix, "bias": draws(f"{role}.{name}.bias", width)}
                weights |= under(f"hydra_mlp.{i}.{slot}.{name}.", own)
        own = {"weight": draws(f"{i}.head", vocabulary, width), "bias": draws(f"{i}.head.bias", vocabulary)}
        weights |= under(f"hydra_lm_head.{i}.{'1.' if prefixed else ''}", own)
    return save(folder, settings, weights | (_prefix(draws, target) if prefixed else {}), "hydra_lm_head.pt")


def _prefix(draws: Draws, target: PreTrainedModel) -> Weights:
    """A Llama model of one layer in the target's shape, with embeddings and frequencies that nothing reads."""
    config = target.config
    own = attention_weights(draws, "prefix.", config, config.hidden_size) | mlp_weights(draws, "prefix.", config)
    own["input_layernorm.weight"] = draws.norm("prefix.input", config.hidden_size)
    own["self_attn.rotary_emb.inv_freq"] = torch.arange(1.0, 1.0 + config.head_dim // 2)
    rest = {"norm.weight": draws.norm("prefix.norm", config.hidden_size)}
    rest["embed_tokens.weight"] = draws("prefix.embed", config.vocab_size, config.hidden_size)
    return under(PREFIX, rest) | under(f"{PREFIX}layers.0.", own)


def hydra_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    settings, weights = opened(folder, target.dtype)
    blocks, offset = len(target.get_decoder().layers), settings["hidden_state_offset"]
    final = blocks if wrong == "feature before the norm" else -1
    states = features(target, tokens, [blocks - offset if offset else final])
    prefixed = settings["hydra_head_arch"] == "prefix-mlp"
    if prefixed and wrong != "prefix layer left out":
        states = layer(states, weights, f"{PREFIX}layers.0.", target.config)
        if wrong != "norm of the prefix layer left out":
            states = rms_norm(states, weights[f"{PREFIX}norm.weight"], target.config.rms_norm_eps)
    rows = []
    for i in range(1 + len(drafted)):
        read = embedding(target)[[tokens[-1], *drafted[:i]]]
        parts = [states[-1], *(read.flip(0) if wrong == "embeddings from late to early" else read)]
        parts = parts[1:] + parts[:1] if wrong == "state last" else parts
        x = torch.cat(parts) if settings["grounded_heads"] else states[-1]
        for j in range(settings["hydra_num_layers"]):
            name = f"hydra_mlp.{i}.{2 * j + 1 if prefixed else j}."
            residual = x
            if f"{name}res_connection.weight" in weights:
                residual = F.linear(x, weights[f"{name}res_connection.weight"], weights[f"{name}res_connection.bias"])
            x = residual + F.silu(F.linear(x, weights[f"{name}linear.weight"], weights[f"{name}linear.bias"]))
        name = f"hydra_lm_head.{i}.{'1.' if prefixed else ''}"
        bias = None if wrong == "bias of the head left out" else weights[f"{name}bias"]
        rows.append(F.linear(x, weights[f"{name}weight"], bias))
    return torch.stack(rows)


WRONG = ("feature before the norm", "embeddings from late to early", "state last", "bias of the head left out")
FORMATS = [
    Foreign(
        "hydra",
        write_hydra,
        hydra_logits,
        "conditional",
        variants={
            "published": {},
            "three layers": dict(layers=3),
            "three layers apart": dict(layers=3, aliased=False),
            "not grounded": dict(grounded=False),
            "earlier state": dict(offset=2),
            "prefix": dict(arch="prefix-mlp"),
            "prefix, four layers": dict(arch="prefix-mlp", layers=4),
        },
        controls={wrong: {} for wrong in WRONG}
        | {f"{part} left out": dict(arch="prefix-mlp") for part in ("prefix layer", "norm of the prefix layer")},
        rows=HEADS,
        file="hydra_lm_head.pt",
    )
]
