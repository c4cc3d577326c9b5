"""Exceptions for single architectures, each with its reason."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedConfig

# Model types whose forward takes no positions: only the biases of keys depend on them; see `runtime/alibi.py`.
WITHOUT_POSITIONS = {"bloom", "mpt"}

# Kinds of layers in which the KV of a node depends on its path alone, so that branches can share a prefix.
HOSTED_LAYERS = {"full_attention", "sliding_attention"}


def _rope_type(config: PreTrainedConfig) -> str | None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    types = (
        [rope.get("rope_type")]
        if "rope_type" in rope
        else [r.get("rope_type") for r in rope.values() if isinstance(r, dict)]
    )
    return next((t for t in types if t in ("dynamic", "longrope")), None)


def _counted_keys(config: PreTrainedConfig) -> str | None:
    if config.model_type == "doge":
        return "keeps the top keys of those in the cache, so a row depends on the lengths of other rows"
    return None


def _routed_encoder(config: PreTrainedConfig) -> str | None:
    if config.model_type in ("switch_transformers", "nllb-moe"):
        return "returns more from its encoder than states (its routing), which is not kept"
    return None


def _length_dependent_rope(config: PreTrainedConfig) -> str | None:
    if kind := _rope_type(config):
        return (
            f"uses {kind} rotary scaling, whose frequencies change with the longest position of a pass, "
            "so a drafted node could change the scores of the nodes before it"
        )
    return None


# Each: config -> why the model cannot be hosted exactly, or None.
REFUSALS: list[Callable[[PreTrainedConfig], str | None]] = [
    _counted_keys,
    _routed_encoder,
    _length_dependent_rope,
]


def learned_positions(config: PreTrainedConfig) -> int | None:
    """The size of a table of positions or biases, past which the model itself fails; None for rotary positions."""
    if config.model_type == "mpt":  # biases for its longest text
        return config.max_seq_len
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    return None if rotary else getattr(config, "max_position_embeddings", None)
