"""Published formats of EAGLE-3 heads: SafeAILab's, SpecForge's and SGLang's, and that of vLLM's `speculators`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from truedraft.drafters.heads._checkpoint import Foreign, Format, loaded
from truedraft.drafters.heads._head import Head
from truedraft.drafters.heads._published import (
    check_size,
    checked_layers,
    draft_tokens,
    layer_fields,
    own_weights,
    text_config,
)

IDS = "eagle_aux_hidden_state_layer_ids"
MIDLAYER, SPECULATORS = "midlayer.self_attn.q_proj.weight", "layers.0.hidden_norm.weight"
Made = Callable[[dict[str, Any], PreTrainedModel], Head]


def formats(made: Made) -> tuple[Format, ...]:
    """The formats that are read. made: the untrained head of a record."""
    return (
        Format("SpecForge's", lambda folder: MIDLAYER in folder.tensors, lambda *of: _midlayer(made, *of)),
        Format("speculators'", lambda folder: SPECULATORS in folder.tensors, lambda *of: _speculators(made, *of)),
    )


def _midlayer(made: Made, folder: Foreign, model: PreTrainedModel) -> Head:
    """A head whose decoder layer is named `midlayer`."""
    config, weights = folder.config, own_weights(folder, model)
    layers, convention = _sglang_layers(config, text_config(model).num_hidden_layers)
    record = _record(folder, config, config, weights, model, layers) | dict(
        blocks=1, norm_before_residual=False, head_norms="midlayer.self_attn.q_norm.weight" in weights,
        fuse_bias=bool(config.get("bias")) or "fc.bias" in weights, source="SpecForge", convention=convention,
    )  # fmt: skip
    return _read(made, folder, model, record, weights)


def _sglang_layers(config: Mapping[str, Any], blocks: int) -> tuple[Sequence[int], str]:
    """The layers that a head reads, and how the source numbers them: explicit ids that begin with 1 are blocks, from 0
    on, whose outputs it reads (SGLang); others are layers. Exports from here name the layers themselves."""
    if own := (config.get("truedraft") or {}).get("layers"):
        return own, "layers"
    ids = (config.get("eagle_config") or {}).get(IDS) or config.get(IDS)
    if not ids:
        return (2, blocks // 2, blocks - 3), "default"
    if ids[0] == 1:
        return [at + 1 for at in ids], "outputs of blocks"
    return ids, "layers"


def _speculators(made: Made, folder: Foreign, model: PreTrainedModel) -> Head:
    """A head of `speculators`, whose decoder layers are `layers.0`, `layers.1` and so on."""
    config, nested = folder.config, folder.config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise folder.refused("its config.json has no transformer_layer_config: give one saved by speculators")
    weights = {_renamed(name): w for name, w in own_weights(folder, model).items()}
    blocks, ids = text_config(model).num_hidden_layers, config.get(IDS)
    record = _record(folder, config, nested, weights, model, ids or (2, blocks // 2, blocks - 3)) | dict(
        blocks=nested.get("num_hidden_layers", 1), norm_before_residual=bool(config.get("norm_before_residual")),
        head_norms=nested.get("model_type") == "qwen3", fuse_bias="fc.bias" in weights, source="speculators",
        convention="layers" if ids else "default",
    )  # fmt: skip
    return _read(made, folder, model, record, weights)


def _renamed(name: str) -> str:
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    if match := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        return f"further_layers.{int(match[1]) - 1}.{match[2]}"
    return name.replace("input_norm.", "fc_norm.0.") if name.startswith("input_norm.") else name


def _record(
    folder: Foreign, config: Mapping[str, Any], layer: Mapping[str, Any], weights: Mapping[str, Tensor],
    model: PreTrainedModel, layers: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """The part of a record (see `Eagle3Head`) that both formats describe alike.

    Args:
        layers: that the head reads; behind those, there may be others that only its training read.

    Raises:
        Refused: it is not of this target's sizes.
    """
    target = text_config(model)
    given = target.hidden_size
    fc = weights.get("fc.weight")
    if fc is None or fc.ndim != 2:
        raise folder.refused("it lacks the matrix fc.weight")
    fields = layer_fields(folder, layer)
    check_size(folder, "target_hidden_size", config.get("target_hidden_size"), given)
    check_size(folder, "vocab_size", layer.get("vocab_size"), target.vocab_size)
    count, rest = divmod(fc.shape[1], given)
    if rest or not 0 < count <= len(layers):
        raise folder.refused(
            f"its fc.weight reads {fc.shape[1]} numbers, not {len(layers)} features of {given} numbers as the target's"
        )
    own_table = "embed_tokens.weight" in weights
    if not own_table and fields["hidden_size"] != given:
        raise folder.refused(f"it lacks embed_tokens.weight: its hidden size is {fields['hidden_size']}, not {given}")
    return dict(
        layers=checked_layers(folder, layers[:count], model), feature_size=given, layer=fields,
        norm_output=bool(config.get("norm_output")), fuse_norm=_fuse_norm(folder, config, weights),
        embeddings=own_table,
    )  # fmt: skip


def _fuse_norm(folder: Foreign, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> str:
    each, whole = bool(config.get("fc_norm")), bool(config.get("norm_before_fc"))
    if each and whole:
        raise folder.refused("its config.json has both fc_norm and norm_before_fc: one of them can be read")
    stored = any(name.startswith("fc_norm.") for name in weights)
    if each or whole or not stored:
        return "each" if each else "whole" if whole else ""
    return "each" if "fc_norm.0.weight" in folder.tensors else "whole"


def _read(
    made: Made, folder: Foreign, model: PreTrainedModel, record: dict[str, Any], weights: dict[str, Tensor]
) -> Head:  # fmt: skip
    """The head of a record, with its weights, and its draft vocabulary as target ids."""
    vocabulary = text_config(model).vocab_size
    offsets, membership = (weights.pop(name, None) for name in ("d2t", "t2d"))
    stored = weights.get("lm_head.weight")
    count = vocabulary if stored is None else len(stored)
    if offsets is not None:
        check_size(folder, "d2t", len(offsets), count)
        draft_token_ids = draft_tokens(folder, offsets, membership, vocabulary)
        if count < vocabulary:
            weights["draft_token_ids"] = draft_token_ids
    elif count != vocabulary:
        raise folder.refused(f"it lacks d2t: its lm_head has {count} rows, the target {vocabulary} tokens")
    record |= dict(draft_vocabulary=count if count < vocabulary else 0, output_head=stored is not None)
    return loaded(made(record, model), weights, folder.source)
