"""Published formats of DFlash heads: z-lab's, that of vLLM's `speculators`, and that of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from truedraft.drafters.heads._blocks import BlockHead
from truedraft.drafters.heads._checkpoint import Foreign, Format, loaded
from truedraft.drafters.heads._published import (
    check_size,
    checked_layers,
    draft_tokens,
    layer_fields,
    own_weights,
    text_config,
)
from truedraft.errors import why

ASSISTANT = "muse_glimmer_assistant"  # what transformers calls the model
Made = Callable[[dict[str, Any], PreTrainedModel], BlockHead]


def formats(made: Made) -> tuple[Format, ...]:
    """The formats that are read. made: the untrained head of a record."""
    return (
        Format("z-lab's", lambda folder: "dflash_config" in folder.config, lambda *of: _zlab(made, *of)),
        Format("speculators'", _is_of_speculators, lambda *of: _speculators(made, *of)),
        Format(
            "transformers'",
            lambda folder: folder.config.get("model_type") == ASSISTANT,
            lambda *of: _transformers(made, *of),
        ),
    )


def published_layers(count: int, blocks: int) -> tuple[int, ...]:
    """The layers that a head of `count` decoder layers reads of a target of `blocks` by default: the outputs of the
    middle block, or of as many as it has layers, from the second to the third from the end."""
    if count == 1:
        return (blocks // 2 + 1,)
    return tuple(round(1 + i * (blocks - 4) / (count - 1)) + 1 for i in range(count))


def _is_of_speculators(folder: Foreign) -> bool:
    return folder.config.get("speculators_model_type") == "dflash"


def _zlab(made: Made, folder: Foreign, model: PreTrainedModel) -> BlockHead:
    """A head without embeddings and output head; `target_layer_ids` are blocks whose outputs it reads."""
    config, own = folder.config, folder.config["dflash_config"]
    if not isinstance(own, dict):
        raise folder.refused("the dflash_config in its config.json is no object")
    blocks, count = text_config(model).num_hidden_layers, _whole(folder, config, "num_hidden_layers", 1, 1 << 10)
    check_size(folder, "num_target_layers", config.get("num_target_layers"), blocks)
    ids = own.get("target_layer_ids") or config.get("target_layer_ids")
    layers = _after(folder, ids) if ids else published_layers(count, blocks)
    record = _record(folder, config, model, layers) | dict(
        block_size=config.get("block_size") or own.get("block_size"), mask_token_id=own.get("mask_token_id"),
        from_anchor=False, causal=bool(own.get("causal", config.get("is_causal", False))),
        source="z-lab", convention="outputs of blocks" if ids else "default",
    )  # fmt: skip
    if own.get("use_swa") or own.get("attention_sink_bias"):
        raise folder.refused("it has sliding windows or attention sinks, which are not read: give a head without")
    return _read(made, folder, model, record, own_weights(folder, model))


def _speculators(made: Made, folder: Foreign, model: PreTrainedModel) -> BlockHead:
    """A head with its own embeddings and output head, of a reduced vocabulary where it has `d2t`."""
    config, nested = folder.config, folder.config.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise folder.refused("its config.json has no transformer_layer_config: give one saved by speculators")
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list):
        raise folder.refused("its config.json has no aux_hidden_state_layer_ids: give one saved by speculators")
    check_size(folder, "target_hidden_size", config.get("target_hidden_size"), text_config(model).hidden_size)
    record = _record(folder, nested, model, ids) | dict(
        block_size=config.get("block_size"), mask_token_id=config.get("mask_token_id"),
        from_anchor=bool(config.get("sample_from_anchor")), causal=bool(config.get("causal")),
        source="speculators", convention="layers",
    )  # fmt: skip
    return _read(made, folder, model, record, own_weights(folder, model))


def _transformers(made: Made, folder: Foreign, model: PreTrainedModel) -> BlockHead:
    """A `MuseGlimmerAssistantModel`; some or all of its layers have a window, which reaches as far forwards as back."""
    try:
        config: Any = CONFIG_MAPPING[ASSISTANT](**{k: v for k, v in folder.config.items() if k != "architectures"})
    except Exception as e:  # transformers' validation raises various exceptions
        raise folder.refused(f"its config.json describes no {ASSISTANT}: {' '.join(why(e).split())[:200]}") from e
    windows = [config.sliding_window if kind == "sliding_attention" else 0 for kind in config.layer_types]
    given = folder.config | dict(num_hidden_layers=config.num_hidden_layers, layer_types=None)
    record = _record(folder, given, model, _after(folder, config.target_layer_ids), (ASSISTANT,)) | dict(
        block_size=config.block_size, mask_token_id=config.mask_token_id, from_anchor=False, causal=False,
        windows=windows, source="transformers", convention="outputs of blocks",
    )  # fmt: skip
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    return _read(made, folder, model, record, {names.get(n, n): w for n, w in own_weights(folder, model).items()})


def _after(folder: Foreign, ids: Any) -> list[int]:
    """The layers that are the outputs of blocks, numbered from 0 on."""
    if not isinstance(ids, list) or any(type(at) is not int for at in ids):
        raise folder.refused(f"its target_layer_ids are {ids!r}: a list of numbers of blocks is needed")
    return [at + 1 for at in ids]


def _whole(folder: Foreign, config: Mapping[str, Any], name: str, least: int, most: int) -> int:
    """A whole number of a configuration.

    Raises:
        Refused: it is none, or not in this range.
    """
    value = config.get(name)
    if type(value) is not int or not least <= value <= most:
        raise folder.refused(f"its {name} is {value!r}: a whole number from {least} to {most} is needed")
    return value


def _record(
    folder: Foreign, layer: Mapping[str, Any], model: PreTrainedModel, layers: Sequence[int], kinds: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The part of a record (see `DFlashHead`) that all formats describe alike.

    layer: the configuration of its decoder layers. kinds: of these.

    Raises:
        Refused: it is not of this target's sizes, or its layers are not read.
    """
    target = text_config(model)
    if any(kind != "full_attention" for kind in layer.get("layer_types") or ()):
        raise folder.refused("it has layers with sliding windows, which are not read: give a head without")
    fields = layer_fields(folder, {"model_type": "qwen3", **layer}, kinds or ("qwen3",))
    check_size(folder, "vocab_size", layer.get("vocab_size"), target.vocab_size)
    return dict(
        layers=checked_layers(folder, layers, model), feature_size=target.hidden_size, layer=fields,
        blocks=_whole(folder, layer, "num_hidden_layers", 1, 1 << 10), head_norms=True,
    )  # fmt: skip


def _read(
    made: Made, folder: Foreign, model: PreTrainedModel, record: dict[str, Any], weights: dict[str, Tensor]
) -> BlockHead:  # fmt: skip
    """The head of a record, with its weights, and its draft vocabulary as target ids."""
    target = text_config(model)
    _whole(folder, record, "block_size", 2, 1 << 16)
    _whole(folder, record, "mask_token_id", 0, target.vocab_size - 1)
    record.setdefault("windows", [0] * record["blocks"])
    weights = {
        n.replace("layers.", "decoder_layers.", 1) if n.startswith("layers.") else n: w for n, w in weights.items()
    }
    fc = weights.get("fc.weight")
    if fc is not None and fc.shape[-1] != (width := len(record["layers"]) * target.hidden_size):
        raise folder.refused(
            f"its fc.weight reads {fc.shape[-1]} numbers, not {width} of the target's layers that it names"
        )
    if "embed_tokens.weight" not in weights:
        check_size(folder, "hidden_size", record["layer"]["hidden_size"], target.hidden_size)
    offsets, membership = (weights.pop(name, None) for name in ("d2t", "t2d"))
    stored = weights.get("lm_head.weight")
    count = target.vocab_size if stored is None else len(stored)
    if offsets is not None:
        check_size(folder, "d2t", len(offsets), count)
        draft_token_ids = draft_tokens(folder, offsets, membership, target.vocab_size)
        if count < target.vocab_size:
            weights["draft_token_ids"] = draft_token_ids
    elif count != target.vocab_size:
        raise folder.refused(f"it lacks d2t: its lm_head has {count} rows, the target {target.vocab_size} tokens")
    record |= dict(
        draft_vocabulary=count if count < target.vocab_size else 0, output_head=stored is not None,
        embeddings="embed_tokens.weight" in weights,
    )  # fmt: skip
    return loaded(made(record, model), weights, folder.source)
