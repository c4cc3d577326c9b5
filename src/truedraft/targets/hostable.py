"""Checks that a model's output can be reproduced exactly."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from truedraft.caches.states import MIXED_LAYERS, STATE_LAYERS, layer_kinds
from truedraft.errors import Refused
from truedraft.runtime.positions import has_table
from truedraft.runtime.seq2seq_programs import layer_types_of
from truedraft.targets.kinds import family_of, reads_sources
from truedraft.targets.quirks import HOSTED_LAYERS, REFUSALS, WITHOUT_POSITIONS, switches

# Arguments that the forward must have, or one of those joined by "or".
NEEDED = {
    "decoder": ("position_ids", "past_key_values", "attention_mask"),
    "encoder-decoder": ("encoder_outputs", "past_key_values", "decoder_attention_mask"),
}
NEEDED_FOR_STATES = ("past_key_values or cache_params or state", "attention_mask")


def _drops(module: Any) -> bool:
    """Whether a module applies dropout."""
    rates = [value for name, value in vars(module).items() if name == "p" or "drop" in name]
    return module.training and any(isinstance(rate, float) and rate > 0 for rate in rates)


def check_runtime(runtime: str) -> None:
    """Raises Refused for a way of making passes that there is not."""
    if runtime not in ("auto", "in-place", "stock"):
        raise Refused(
            f"runtime={runtime!r}: give 'auto' (compiled passes where they are available), 'in-place' (the same "
            "without a copy of the weights) or 'stock'"
        )


def keeps_states(config: Any) -> bool:
    """Whether decoders with such a configuration have layers whose states follow one text (`caches/states.py`)."""
    if reads_sources(config):
        return False
    kinds = layer_kinds(config.get_text_config(decoder=True))
    return not (STATE_LAYERS | MIXED_LAYERS).isdisjoint(kinds)


def layer_types(model: Any) -> list[str]:
    """The kind of each layer of a decoder; in those of encoder-decoders the configuration counts the encoder's."""
    if has_table(model):
        return layer_types_of(model.get_decoder())
    return layer_kinds(model.config.get_text_config(decoder=True))


def check_hosted(model: Any) -> None:
    """Raises Refused, in one sentence, where a model cannot be hosted exactly."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise Refused(
            f"model={name} is not a model of transformers: load one with AutoModelForCausalLM.from_pretrained"
        )
    if not getattr(model, "can_generate", lambda: False)():
        raise Refused(f"{name} is not generative: it has no language-model head; load it with AutoModelForCausalLM")
    if model.training or any(_drops(module) for module in model.modules()):
        raise Refused(f"{name} is in training mode, where dropout makes the text random: call model.eval() first")
    if model.device.type == "meta":
        raise Refused(f"{name} has no weights, its tensors are on torch's meta device: load it with from_pretrained")
    config = model.config.get_text_config(decoder=True)
    for refusal in REFUSALS:
        if why := refusal(config) or refusal(model.config):
            raise Refused(f"{name} cannot be hosted exactly: it {why}")
    if reads_sources(model.config) and getattr(type(model), "generate", None) is not GenerationMixin.generate:
        raise Refused(f"{name} cannot be hosted exactly: it overrides generate, which then does more than decode")
    parameters = inspect.signature(model.forward).parameters
    stateful = keeps_states(model.config)
    for needed in NEEDED_FOR_STATES if stateful else NEEDED[family_of(model.config)]:
        if parameters.keys().isdisjoint(needed.split(" or ")) and not (
            needed == "position_ids" and (config.model_type in WITHOUT_POSITIONS or has_table(model))
        ):
            raise Refused(f"{name} cannot be hosted exactly: its forward has no argument {needed}, which trees need")
    hosted = HOSTED_LAYERS | STATE_LAYERS | MIXED_LAYERS | {"dummy"} if stateful else HOSTED_LAYERS
    kinds = layer_kinds(config)
    while kinds and kinds[-1] == "dummy":  # read the keys and values of layers before them
        kinds = kinds[:-1]
    foreign = set(kinds) - hosted
    if foreign or (getattr(model, "_is_stateful", False) and not stateful):
        others = ", ".join(sorted(foreign)) or "recurrent state"
        raise Refused(
            f"{name} cannot be hosted exactly: it has {others} layers, whose state cannot be rolled back to a path"
        )
    if (stateful or reads_sources(model.config)) and (found := switches(config)):
        raise Refused(
            f"{name} cannot be hosted exactly: it uses {found[0][0]} rotary scaling, whose frequencies change with the "
            "length of a text, which is followed in decoders without states alone"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise Refused(
            f"attn_implementation={attention!r} supports no tree mask: load the model with attn_implementation='sdpa'"
        )
