"""What the formats of published heads share: fields of decoder layers, embeddings, layers of the target, vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from truedraft.drafters.heads._checkpoint import Foreign
from truedraft.errors import why

KINDS = ("llama", "qwen2", "qwen3")  # of decoder layers
FIELDS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps", "hidden_act",
    "max_position_embeddings", "rope_parameters",
)  # fmt: skip


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of a target's decoder."""
    return model.config.get_text_config(decoder=True)


def layer_fields(folder: Foreign, given: Mapping[str, Any], kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Fields for `_layers.layer_config` of a published configuration of layers; what it leaves out has the defaults of
    transformers for its `model_type`, one of `kinds`.

    Raises:
        Refused: layers of another kind, or invalid fields.
    """
    kind = given.get("model_type", "llama")
    if kind not in kinds:
        raise folder.refused(f"its layers are of the kind {kind!r}; give a head with one of {', '.join(kinds)}")
    try:
        config: Any = CONFIG_MAPPING[kind](**{k: v for k, v in given.items() if k != "architectures"})
        fields = fields_of(config)
    except Exception as e:  # transformers' validation raises various exceptions
        raise folder.refused(f"its config.json describes no layers of the kind {kind!r}: {_line(e)}") from e
    return fields | {name: bool(getattr(config, name, False)) for name in ("attention_bias", "mlp_bias")}


def fields_of(config: Any) -> dict[str, Any]:
    """Fields for `_layers.layer_config` of the configuration of a model with such layers, biases apart."""
    fields = {name: getattr(config, name) for name in FIELDS}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {**fields, "head_dim": head_dim}


def own_weights(folder: Foreign, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a folder, without tables of angles, and without embeddings that are the target's."""
    weights = {n: w for n, w in folder.tensors.items() if not n.endswith("rotary_emb.inv_freq")}
    table: Any = model.get_input_embeddings().weight
    stored = weights.get("embed_tokens.weight")
    if stored is not None and stored.shape == table.shape and torch.equal(stored.to(table), table):
        del weights["embed_tokens.weight"]
    return weights


def checked_layers(folder: Foreign, layers: Sequence[Any], model: PreTrainedModel) -> tuple[int, ...]:
    """Layers that the target has.

    Raises:
        Refused: some are no numbers of its layers.
    """
    blocks = text_config(model).num_hidden_layers
    if wrong := [layer for layer in layers if type(layer) is not int or not 0 <= layer <= blocks]:
        raise folder.refused(f"it reads layer {wrong[0]!r}, but the target has layers 0 to {blocks}: give its target")
    return tuple(layers)


def check_size(folder: Foreign, name: str, found: int | None, expected: int) -> None:
    """Raises:
    Refused: a size in the configuration is not that of the target; None is not checked.
    """
    if found is not None and found != expected:
        raise folder.refused(f"its {name} is {found}, that of the target {expected}: give the head of this target")


def draft_tokens(folder: Foreign, offsets: Tensor, membership: Tensor | None, vocabulary: int) -> Tensor:
    """(draft vocabulary,) target ids of a draft vocabulary, ascending.

    Args:
        offsets: `d2t`: target id less draft id. membership: `t2d`, (V,) bool, if it is stored.

    Raises:
        Refused: they are no ids of the target, not ascending, or not those of `t2d`.
    """
    if offsets.ndim != 1 or offsets.is_floating_point():
        raise folder.refused(f"its d2t is {tuple(offsets.shape)} of {offsets.dtype}, not a row of whole numbers")
    ids = offsets.long() + torch.arange(len(offsets))
    if len(ids) == 0 or ids[0] < 0 or ids[-1] >= vocabulary or (ids.diff() <= 0).any():
        raise folder.refused(f"its d2t gives no ascending ids of the target's {vocabulary} tokens")
    if membership is not None:
        check_size(folder, "vocabulary, by t2d,", len(membership), vocabulary)
        if not torch.equal(membership.bool().nonzero()[:, 0], ids):
            raise folder.refused("its d2t and t2d name different tokens: it is damaged")
    return ids


def _line(error: BaseException) -> str:
    return " ".join(why(error).split())[:200]
