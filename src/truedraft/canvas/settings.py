"""The settings of a call over canvases, from the arguments of `generate` and a generation config."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process

from truedraft.canvas.layout import Layout
from truedraft.canvas.noise import CanvasNoise
from truedraft.canvas.policies._base import Reference
from truedraft.canvas.predicting import Chooser
from truedraft.errors import Refused

NEW = 128  # new tokens where nothing limits them, as in LLaDA's own generate
WARPERS = {  # setting -> its class; each reads the scores of a position alone
    "temperature": "TemperatureLogitsWarper",
    "top_k": "TopKLogitsWarper",
    "top_p": "TopPLogitsWarper",
    "min_p": "MinPLogitsWarper",
    "typical_p": "TypicalLogitsWarper",
    "epsilon_cutoff": "EpsilonLogitsWarper",
    "eta_cutoff": "EtaLogitsWarper",
}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
ALLOWED = {*WARPERS.values(), "SuppressTokensLogitsProcessor", "LogitNormalization"}  # processors of a call
READ = {
    *WARPERS, "max_new_tokens", "max_length", "do_sample", "eos_token_id", "pad_token_id", "bos_token_id",
    "suppress_tokens", "num_return_sequences", "use_cache", "transformers_version",
}  # fmt: skip
PREFIX = "positions are not fixed from left to right, so there is no prefix that it could read"


@dataclass(frozen=True)
class Settings:
    """What a call asks for.

    new: most new tokens. ends: tokens that end a text. pad: behind it. count: texts per prompt.
    layout: with the block length of the call.
    chooser: of tokens.
    tokens: positions fixed per step; None for the policy's own.
    """

    new: int
    ends: frozenset[int]
    pad: int
    count: int
    layout: Layout
    chooser: Chooser
    tokens: int | None


def settings_of(model: Any, layout: Layout, prompt: int, given: Mapping[str, Any]) -> Settings:
    """The settings of a call.

    Args:
        prompt: length of the longest prompt.
        given: arguments of `generate` besides the inputs.

    Raises:
        Refused: an unknown argument, or a value that cannot be honoured; the message gives the remedy.
    """
    kwargs = dict(given)
    block, steps, seed = (kwargs.pop(name, None) for name in ("block_length", "steps", "seed"))
    processors = kwargs.pop("logits_processor", None) or []
    most = kwargs.get("max_new_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, Integral) or most < 1):
        raise Refused(f"max_new_tokens={most!r}: give a whole number of at least 1")
    config = _config(model, kwargs)
    layout = layout.of_length(block)
    new = config.max_new_tokens or (config.max_length - prompt if config.max_length else NEW)
    if new < 1:
        raise Refused(f"max_length={config.max_length} leaves no room behind {prompt} prompt tokens: raise it")
    sample = bool(config.do_sample)
    noise = CanvasNoise(seed_of(seed)) if sample else None
    ends = config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    return Settings(
        int(new), frozenset(ends), pad, config.num_return_sequences or 1, layout,
        Chooser(_warpers(config, processors, sample, model.device), noise), _tokens(steps, layout, int(new)),
    )  # fmt: skip


def _config(model: Any, kwargs: dict[str, Any]) -> GenerationConfig:
    """The generation config of a call; raises Refused for what it has besides `READ`."""
    config = kwargs.pop("generation_config", None) or getattr(model, "generation_config", None) or GenerationConfig()
    config = copy.deepcopy(config)
    if unknown := config.update(**kwargs):
        name = min(unknown)
        near = difflib.get_close_matches(name, [*READ, "block_length", "steps", "seed", "logits_processor"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise Refused(f"{name}={unknown[name]!r} is no setting of canvases{hint}")
    for name, value in config.to_diff_dict().items():
        if value and value != 1 and name not in READ and not name.startswith("_"):
            raise Refused(f"{name}={value!r} is not supported for diffusion models: {PREFIX}; leave it out")
    return config


def _warpers(config: GenerationConfig, given: Any, sample: bool, device: torch.device) -> LogitsProcessorList:
    found = LogitsProcessorList()
    for processor in given:
        if type(processor).__name__ not in ALLOWED:
            raise Refused(
                f"logits_processor {type(processor).__name__} is not supported for diffusion models: {PREFIX}"
            )
        found.append(processor)
    if config.suppress_tokens:
        found.append(logits_process.SuppressTokensLogitsProcessor(config.suppress_tokens, device=str(device)))
    for name, kind in WARPERS.items():
        value = getattr(config, name, None)
        if sample and value is not None and value != NEUTRAL.get(name):
            options = {"device": str(device)} if name == "eta_cutoff" else {}
            try:
                found.append(getattr(logits_process, kind)(value, **options))
            except ValueError as error:
                raise Refused(f"{name}={value!r}: {error}") from error
    return found


def seed_of(seed: Any) -> int:
    """A seed of sampling; from torch's generator where none is given."""
    if seed is None:
        return int(torch.randint(2**62, ()))
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**64:
        raise Refused(f"seed={seed!r}: give an integer from 0 to 2**64 - 1")
    return int(seed)


def _tokens(steps: Any, layout: Layout, new: int) -> int | None:
    """Positions fixed per step where `steps` are to fill all blocks."""
    if steps is None:
        return None
    total = -(-new // layout.block) * layout.block
    whole = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
    if not whole or total % steps or steps * layout.block % total:
        raise Refused(
            f"steps={steps!r}: give a divisor of the {total} positions to fill that is a multiple of their "
            f"{total // layout.block} blocks of {layout.block}, or leave it out for one position per step"
        )
    return total // int(steps)


def with_tokens(policy: Any, tokens: int | None) -> Any:
    """The policy with so many positions per step.

    Raises:
        Refused: it decides itself how many.
    """
    if tokens is None:
        return policy
    if not isinstance(policy, Reference):
        raise Refused("steps: this policy decides itself how many positions a step fixes: leave `steps` out")
    changed = copy.copy(policy)
    changed.tokens = tokens
    return changed


def prompts_of(inputs: Any, attention_mask: Any, layout: Layout, vocabulary: int) -> list[list[int]]:
    """The prompts of a call without padding.

    Raises:
        Refused: no token ids, an empty prompt, padding within a prompt, or a mask in it.
    """
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point() or not inputs.numel():
        raise Refused("inputs: give (batch, length) token ids of at least one token, a tensor")
    rows = inputs.tolist()
    if attention_mask is not None:
        if attention_mask.shape != inputs.shape:
            raise Refused(f"attention_mask has shape {tuple(attention_mask.shape)}, the inputs {tuple(inputs.shape)}")
        lines = attention_mask.bool().tolist()
        if any(line != sorted(line) for line in lines):
            raise Refused("attention_mask: padding must stand before the prompts: set padding_side='left'")
        rows = [row[len(row) - sum(line) :] for row, line in zip(rows, lines, strict=True)]
    for i, row in enumerate(rows):
        if not row:
            raise Refused(f"the prompt of row {i} is empty: give at least one token")
        if layout.mask in row:
            raise Refused(f"the prompt of row {i} contains the mask token {layout.mask}: only the canvas has masks")
        if not 0 <= min(row) <= max(row) < vocabulary:
            raise Refused(f"the prompt of row {i} has token ids outside the model's vocabulary of {vocabulary}")
    return rows
