"""Medusa in three layouts: the published heads' file, Medusa-2 within a full model, and that of vLLM; arXiv 2401.10774.

Every head reads the target's state after the final norm at the last processed token: x + SiLU(W x + b), L times, then
an output matrix. Head i drafts the token i after the pending one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from foreign import Foreign
from foreign.common import Draws, Weights, checkpoint, features, head, opened, save, scattered, under

HEADS = 4


def _heads(draws: Draws, target: PreTrainedModel, layers: int, aliased: bool) -> list[tuple[list[Weights], Tensor]]:
    """Per head its blocks' weight and bias, and its output matrix; with `aliased` a head's blocks are one."""
    width, vocabulary = target.config.hidden_size, target.config.vocab_size
    found = []
    for i in range(HEADS):
        roles = [f"{i}.{0 if aliased else j}" for j in range(layers)]
        blocks = [{"weight": draws(f"{r}.w", width, width), "bias": draws(f"{r}.bias", width)} for r in roles]
        found.append((blocks, draws(f"{i}.head", vocabulary, width)))
    return found


def _published(draws: Draws, target: PreTrainedModel, layers: int, aliased: bool) -> Weights:
    weights: Weights = {}
    for i, (blocks, matrix) in enumerate(_heads(draws, target, layers, aliased)):
        for j, block in enumerate(blocks):
            weights |= under(f"{i}.{j}.linear.", block)
        weights[f"{i}.{layers}.weight"] = matrix
    return weights


def write_medusa(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    layers: int = 1,
    aliased: bool = True,
    claimed: int = HEADS,
    file: str = "medusa_lm_head.pt",
) -> Path:
    """layers: blocks of a head, which the published code makes one (`aliased`). claimed: heads in the configuration;
    old ones claim two of five."""
    settings = dict(medusa_num_heads=claimed, medusa_num_layers=layers, base_model_name_or_path="target")
    return save(folder, settings, _published(Draws(seed), target, layers, aliased), file)


def write_medusa2(
    folder: Path, target: PreTrainedModel, seed: int, *, layers: int = 1, claimed: int | None = HEADS
) -> Path:
    """The target's own checkpoint with the heads in it. claimed: None leaves the number of heads out of the
    configuration."""
    settings, own = checkpoint(folder, target)
    settings |= dict(version="2", medusa_num_layers=layers) | ({} if claimed is None else {"medusa_num_heads": claimed})
    heads = under("medusa_head.", _published(Draws(seed), target, layers, True))
    return save(folder, settings, own | heads, "model.safetensors")


def write_vllm(
    folder: Path,
    target: PreTrainedModel,
    seed: int,
    *,
    layers: int = 1,
    bias: bool = True,
    kept: int | None = None,
    cut: bool = True,
    one_head: bool = False,
    prefix: str = "",
) -> Path:
    """bias: `medusa_fc_bias`. kept: size of the draft vocabulary, with `token_map`; cut: the output matrices are stored
    with that many rows. one_head: `original_lm_head`, one output matrix for all. prefix: before the heads' names."""
    draws, vocabulary = Draws(seed), target.config.vocab_size
    settings: dict[str, Any] = dict(architectures=["MedusaModel"], model_type="medusa", num_heads=HEADS)
    settings |= dict(hidden_size=target.config.hidden_size, vocab_size=vocabulary, num_hidden_layers=layers)
    settings |= dict(truncated_vocab_size=kept or vocabulary, medusa_fc_bias=bias, original_lm_head=one_head)
    weights: Weights = {}
    ids = draws.order("vocabulary", vocabulary)[:kept] if kept else None
    for i, (blocks, matrix) in enumerate(_heads(draws, target, layers, aliased=False)):
        for j, block in enumerate(blocks):
            weights |= under(f"blocks.{i}.layers.{j}.", block if bias else {"weight": block["weight"]})
        if i == 0 or not one_head:
            weights[f"lm_heads.{i}.weight"] = matrix if ids is None or not cut else matrix[ids]
    return save(
        folder, settings, under(prefix, weights) | ({} if ids is None else {"token_map": ids}), "model.safetensors"
    )


def _state(target: PreTrainedModel, tokens: Sequence[int], wrong: str) -> Tensor:
    """(H,): the target's state at the last processed token."""
    layer = len(target.get_decoder().layers) if wrong == "feature before the norm" else -1
    return features(target, tokens, [layer])[-2 if wrong == "state one earlier" else -1]


def medusa_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    """Of the published layout and of Medusa-2."""
    settings, stored = opened(folder, target.dtype)
    inside = {n.removeprefix("medusa_head."): t for n, t in stored.items() if n.startswith("medusa_head.")}
    weights, layers, rows = inside or stored, settings["medusa_num_layers"], []
    for i in range(1 + len(drafted)):
        x = _state(target, tokens, wrong)
        for j in range(layers):
            bias = None if wrong == "biases left out" else weights[f"{i}.{j}.linear.bias"]
            y = F.silu(F.linear(x, weights[f"{i}.{j}.linear.weight"], bias))
            x = y if wrong == "no residual" else x + y
        rows.append(F.linear(x, head(target) if wrong == "head of the target" else weights[f"{i}.{layers}.weight"]))
    return torch.stack(rows)


def vllm_logits(
    folder: Path, target: PreTrainedModel, tokens: Sequence[int], drafted: Sequence[int], wrong: str = ""
) -> Tensor:
    settings, stored = opened(folder, target.dtype)
    weights, rows = {n.removeprefix("medusa_heads."): t for n, t in stored.items()}, []
    vocabulary = settings["vocab_size"]
    ids = weights.get("token_map", torch.arange(vocabulary))
    for i in range(1 + len(drafted)):
        x = _state(target, tokens, wrong)
        for j in range(settings["num_hidden_layers"]):
            bias = None if wrong == "biases left out" else weights.get(f"blocks.{i}.layers.{j}.bias")
            y = F.silu(F.linear(x, weights[f"blocks.{i}.layers.{j}.weight"], bias))
            x = y if wrong == "no residual" else x + y
        matrix = weights[f"lm_heads.{0 if settings['original_lm_head'] else i}.weight"]
        rows.append(F.linear(x, matrix if len(matrix) == len(ids) else matrix[ids]))
    offset = torch.arange(len(ids)) if wrong == "token map as offsets" else 0
    return scattered(torch.stack(rows), (ids + offset) % vocabulary, vocabulary)


WRONG = ("feature before the norm", "state one earlier", "biases left out", "no residual")
FORMATS = [
    Foreign(
        "medusa",
        write_medusa,
        medusa_logits,
        "parallel",
        variants={
            "published": {},
            "safetensors": dict(file="medusa_lm_head.safetensors"),
            "two layers": dict(layers=2),
            "two layers apart": dict(layers=2, aliased=False, file="medusa_lm_head.safetensors"),
            "two heads claimed": dict(claimed=2),
        },
        controls={wrong: {} for wrong in (*WRONG, "head of the target")},
        rows=HEADS,
        file="medusa_lm_head.pt",
    ),
    Foreign(
        "medusa-2",
        write_medusa2,
        medusa_logits,
        "parallel",
        variants={"published": {}, "two layers": dict(layers=2), "no number of heads": dict(claimed=None)},
        controls={wrong: {} for wrong in (*WRONG, "head of the target")},
        rows=HEADS,
    ),
    Foreign(
        "medusa-vllm",
        write_vllm,
        vllm_logits,
        "parallel",
        variants={
            "published": {},
            "no bias": dict(bias=False),
            "two layers": dict(layers=2),
            "token map": dict(kept=29),
            "token map, matrices whole": dict(kept=29, cut=False),
            "one head": dict(one_head=True),
            "prefix": dict(prefix="medusa_heads."),
        },
        controls={wrong: {} for wrong in WRONG} | {"token map as offsets": dict(kept=29)},
        rows=HEADS,
    ),
]
