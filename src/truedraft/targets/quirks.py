"""Exceptions for single architectures, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedConfig

from truedraft.errors import Refused

# Model types whose forward takes no positions: only the biases of keys depend on them; see `runtime/alibi.py`.
WITHOUT_POSITIONS = {"bloom", "mpt"}

# Model types whose forward over several tokens begins at states of zeros, whatever the cache holds.
RESTARTING = {"mamba", "falcon_mamba", "jamba", "zamba"}

# Model types whose states are outside of any cache of transformers, and whose `generate` reads padding as text.
STATES_OUTSIDE = {"recurrent_gemma", "rwkv"}

# Model types whose `generate` lets rows of a batch read each other's states.
MIXING_ROWS = {"rwkv"}

# Kinds of layers in which the KV of a node depends on its path alone, so that branches can share a prefix.
HOSTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}


def window_of(config: PreTrainedConfig, kinds: Sequence[str]) -> int | None:
    """Positions that layers with a sliding window see, or those of a chunk; None where no layer has either."""
    if "chunked_attention" in kinds:
        return int(config.attention_chunk_size)
    return getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None


def _prefix(config: PreTrainedConfig) -> str | None:
    if config.model_type == "paligemma":
        return "attends to later tokens of its prompt where no row of the batch is padded, and not where one is"
    return None


def _counted_keys(config: PreTrainedConfig) -> str | None:
    if config.model_type == "doge":
        return "keeps the top keys of those in the cache, so a row depends on the lengths of other rows"
    return None


def _routed_encoder(config: PreTrainedConfig) -> str | None:
    if config.model_type in ("switch_transformers", "nllb-moe"):
        return "returns more from its encoder than states (its routing), which is not kept"
    return None


def _hidden_window(config: PreTrainedConfig) -> str | None:
    if config.model_type == "minimax" and config.sliding_window is not None:
        return "attends within a sliding window in layers that its configuration calls full_attention"
    return None


def _compressed_keys(config: PreTrainedConfig) -> str | None:
    kinds = getattr(config, "layer_types", None) or ()
    if not {"compressed_sparse_attention", "heavily_compressed_attention"}.isdisjoint(kinds):
        return "makes keys of whole windows of tokens, which would have to be made again for each path through a draft"
    return None


def _own_states(config: PreTrainedConfig) -> str | None:
    if config.model_type == "xlstm":
        return "keeps its states in a cache of its own, which cannot be taken back, and has no compiled pass"
    return None


# Each: config -> why the model cannot be hosted exactly, or None.
REFUSALS: list[Callable[[PreTrainedConfig], str | None]] = [
    _prefix,
    _counted_keys,
    _routed_encoder,
    _hidden_window,
    _compressed_keys,
    _own_states,
]


def learned_positions(config: PreTrainedConfig) -> int | None:
    """The size of a table of positions or biases, past which the model itself fails; None for rotary positions."""
    if config.model_type == "mpt":  # biases for its longest text
        return config.max_seq_len
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    names = ("max_target_positions", "max_position_embeddings")  # Whisper's
    return None if rotary else next((size for name in names if (size := getattr(config, name, None))), None)


# Kinds of rotary scaling whose frequencies change with the length of a text, and what it takes to follow the change.
SWITCHING = {
    "dynamic": "every further token has frequencies of its own, which also depend on the texts read before",
    "longrope": "the whole text would have to be read again with other frequencies",
}


def switches(config: PreTrainedConfig) -> list[tuple[str, int]]:
    """Such kinds of a model, and the last length before the change."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    found = set()
    for given in each:
        if given.get("rope_type") == "longrope":
            found.add(("longrope", given["original_max_position_embeddings"]))
        elif given.get("rope_type") == "dynamic":  # those of a longer text are kept until a text is shorter than this
            found.add(("dynamic", config.max_position_embeddings - 1))
    return sorted(found)


def steps_before_switch(config: PreTrainedConfig, length: int) -> tuple[int, str] | None:
    """Most new tokens behind a prompt, up to the next switch, and what the switch is; None where there is none.

    Args:
        length: of the prompt.
    """
    sides = [(last, kind) for kind, last in switches(config) if not (kind == "longrope" and length > last)]
    if not sides:
        return None
    last, kind = min(sides)
    return last - length + 1, f"past {last}, where this model's rotary scaling ({kind}) changes, and {SWITCHING[kind]}"


def check_sides(config: PreTrainedConfig, lengths: Sequence[int], steps: int) -> None:
    """Raises Refused unless all of a call is on one side of each switch; and, where a model scales queries by their
    indices, padding included, unless no prompt is padded or no index is scaled.

    Args:
        lengths: of the prompts of its rows.
        steps: new tokens at most, of which the last one is never read.
    """
    shortest, longest = min(lengths), max(lengths)
    last = config.floor_scale - 1 if getattr(config, "attn_temperature_tuning", False) else None
    if last is not None and longest > shortest and longest + steps - 1 > last:
        raise Refused(
            f"prompts of {shortest} to {longest} tokens and {steps} new ones reach past {last}, from where this model "
            "scales queries by their indices, padding included: give prompts of one length"
        )
    for kind, last in switches(config):
        if longest + steps - 1 <= last or (kind == "longrope" and shortest > last):
            continue
        advice = [f"set max_new_tokens to at most {last - longest + 1}"] * (longest <= last)
        advice += [f"give prompts of more than {last} tokens"] * (kind == "longrope")
        raise Refused(
            f"a prompt of {shortest if longest > last else longest} tokens and {steps} new ones reach past {last}, "
            f"where this model's rotary scaling ({kind}) changes, and {SWITCHING[kind]}: "
            + (" or ".join(advice) or "shorten the prompt")
        )
