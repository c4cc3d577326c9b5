"""The settings of a call over canvases, from the arguments of `generate` and a generation config."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import StopStringCriteria

from truedraft.call.arguments import with_stop_strings
from truedraft.call.numbers import whole
from truedraft.canvas._base import Canvas, CanvasRow
from truedraft.canvas.ending import OutputStrings
from truedraft.canvas.layout import Layout
from truedraft.canvas.noise import CanvasNoise
from truedraft.canvas.policies._base import Reference
from truedraft.canvas.predicting import Chooser
from truedraft.card import shown
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
ONES = {  # settings that change nothing where they are 1
    "repetition_penalty", "encoder_repetition_penalty", "length_penalty", "num_beams", "num_beam_groups",
    "guidance_scale",
}  # fmt: skip
WHY = {
    "max_time": "a canvas that is cut off has gaps",
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), "tokens alone are returned"),
    **dict.fromkeys(("num_beams", "num_beam_groups"), "beams grow from left to right, and positions are not fixed so"),
}  # setting -> why it is refused, where that is not PREFIX
PREFIX = "positions are not fixed from left to right, so there is no prefix that it could read"


@dataclass(frozen=True)
class Settings:
    """What a call asks for.

    new: most new tokens. ends: tokens that end a text. stops: criteria of stop strings. pad: behind it.
    count: texts per prompt.
    layout: with the block length of the call.
    chooser: of tokens.
    tokens: positions fixed per step; None for the policy's own.
    """

    new: int
    ends: frozenset[int]
    stops: tuple[StopStringCriteria, ...]
    pad: int
    count: int
    layout: Layout
    chooser: Chooser
    tokens: int | None


def settings_of(
    model: Any, layout: Layout, prompt: int, given: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None = None
) -> Settings:
    """The settings of a call.

    Args:
        prompt: length of the longest prompt.
        given: arguments of `generate` besides the inputs.
        tokenizer: reads stop strings.

    Raises:
        Refused: an unknown argument, or a value that cannot be honoured; the message gives the remedy.
    """
    _listed(given.get("stopping_criteria"), "stopping_criteria")
    kwargs = with_stop_strings(given, model, tokenizer)
    stops = _stops(_listed(kwargs.pop("stopping_criteria", None), "stopping_criteria"))
    block, steps, seed = (kwargs.pop(name, None) for name in ("block_length", "steps", "seed"))
    processors = _listed(kwargs.pop("logits_processor", None), "logits_processor")
    if (most := kwargs.get("max_new_tokens")) is not None:
        kwargs["max_new_tokens"] = whole("max_new_tokens", most, least=1)
    config = _config(model, kwargs)
    size = model.config.get_text_config(decoder=True).vocab_size
    _check_tokens("eos_token_id", config.eos_token_id, size)
    _check_tokens("pad_token_id", config.pad_token_id, size)
    _check_tokens("suppress_tokens", config.suppress_tokens, size)
    count = 1 if config.num_return_sequences is None else config.num_return_sequences
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise Refused(f"num_return_sequences={shown(count)}: give a whole number of at least 1")
    layout = layout.of_length(block)
    new = config.max_new_tokens or (whole("max_length", config.max_length) - prompt if config.max_length else NEW)
    if new < 1:
        raise Refused(f"max_length={config.max_length} leaves no room after {prompt} prompt tokens: raise it")
    sample = bool(config.do_sample)
    noise = CanvasNoise(seed_of(seed)) if sample else None
    ends = config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    return Settings(
        int(new), frozenset(ends), stops, pad, count, layout,
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
        raise Refused(f"{name}={shown(unknown[name])} is no setting of canvases{hint}")
    for name, value in config.to_diff_dict().items():
        if value and not (value == 1 and name in ONES) and name not in READ and not name.startswith("_"):
            raise Refused(
                f"{name}={value!r} is not supported for diffusion models: {WHY.get(name, PREFIX)}; leave it out"
            )
    return config


def _listed(given: Any, name: str) -> Sequence[Any]:
    """Raises Refused where it is no list."""
    if given is not None and not isinstance(given, list | tuple):
        raise Refused(f"{name}={shown(given)}: give a list")
    return given or []


def _check_tokens(name: str, given: Any, size: int) -> None:
    """Raises Refused for what is no token id of a vocabulary, or a list of these."""
    for token in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < size:
            raise Refused(f"{name}={shown(given)}: give token ids of the model's vocabulary of {size}")


def _stops(criteria: Iterable[Any]) -> tuple[StopStringCriteria, ...]:
    for criterion in criteria:
        if type(criterion) not in (StopStringCriteria, OutputStrings):
            raise Refused(
                f"stopping_criteria {type(criterion).__name__} is not supported for diffusion models: canvases are "
                "asked whether they end that may never be reached, and it may keep count; give stop_strings or "
                "eos_token_id"
            )
    return tuple(criteria)


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


def check_inputs(inputs: Any, attention_mask: Any) -> None:
    """Raises Refused for what is no batch of token ids, with a mask of its shape or None."""
    whole = isinstance(inputs, Tensor) and inputs.dtype in (torch.int64, torch.int32)
    if not whole or inputs.dim() != 2 or not inputs.numel():
        raise Refused("inputs: give (batch, length) token ids of at least one token, a tensor")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise Refused(f"attention_mask={shown(attention_mask)}: give a tensor")
    if attention_mask.shape != inputs.shape:
        raise Refused(f"attention_mask has shape {tuple(attention_mask.shape)}, the inputs {tuple(inputs.shape)}")


def prompts_of(inputs: Any, attention_mask: Any, layout: Layout | None, vocabulary: int) -> list[list[int]]:
    """The prompts of a call without padding.

    layout: None where prompts may have masks.

    Raises:
        Refused: no token ids, an empty prompt, padding within a prompt, or a mask in it.
    """
    check_inputs(inputs, attention_mask)
    rows = inputs.tolist()
    if attention_mask is not None:
        lines = attention_mask.bool().tolist()
        if any(line != sorted(line) for line in lines):
            raise Refused("attention_mask: padding must stand before the prompts: set padding_side='left'")
        rows = [row[len(row) - sum(line) :] for row, line in zip(rows, lines, strict=True)]
    for i, row in enumerate(rows):
        if not row:
            raise Refused(f"the prompt of row {i} is empty: give at least one token")
        if layout is not None and layout.mask in row:
            raise Refused(f"the prompt of row {i} contains the mask token {layout.mask}: only the canvas has masks")
        if not 0 <= min(row) <= max(row) < vocabulary:
            raise Refused(f"the prompt of row {i} has token ids outside the model's vocabulary of {vocabulary}")
    return rows


def check_fits(prompt: int, more: str, positions: int, context: int | None) -> None:
    """Raises Refused where a prompt and what is to be filled behind it exceed the context.

    Args:
        prompt: its tokens.
        more: what is to be filled, in words.
        positions: of both together.
        context: positions that the model was trained for; None where that is not known.
    """
    if context is not None and positions > context:
        raise Refused(
            f"{prompt} prompt tokens and {more} make a text of {positions} positions, the model's context has "
            f"{context}: lower max_new_tokens or shorten the prompt"
        )


def row_of(prompt: list[int], settings: Settings, index: int, context: int | None) -> CanvasRow:
    """A prompt with its canvas.

    Args:
        index: of the row, for its noise.
        context: see `check_fits`.

    Raises:
        Refused: the canvas does not fit the context.
    """
    blocks = settings.layout.blocks(len(prompt), settings.new)
    length = blocks[-1].stop
    check_fits(len(prompt), f"{settings.new} new ones", length, context)
    canvas = Canvas.behind(prompt, settings.layout.mask, length)
    return CanvasRow(index, canvas, len(prompt), blocks, settings.ends, settings.new, settings.stops)
