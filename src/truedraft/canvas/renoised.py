"""`accelerate(model)` for `diffusion_gemma`: the text of its own `generate`, without passes over complete canvases."""

from __future__ import annotations

import copy
import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft.call.surroundings import defaults, exclusive
from truedraft.canvas.renoise import Denoiser, Settings, Step
from truedraft.canvas.settings import check_fits, check_inputs, seed_of
from truedraft.errors import Refused
from truedraft.standin import StandIn
from truedraft.stats import Emission, Pass, Report
from truedraft.stopwatch import Stopwatch
from truedraft.targets.hostable import check_runtime

READS = {"decoder_input_ids", "self_conditioning_logits"}  # arguments of the forward of such a model
OWN = "use its own generate, model.generate"
AHEAD = (
    "no later canvas can be verified ahead, because each pass reads all logits of the one before (self-conditioning), "
    "which no draft has"
)
NEEDED = (
    "sampler_config", "max_new_tokens", "max_denoising_steps", "t_min", "t_max", "stability_threshold",
    "confidence_threshold",
)  # fmt: skip
CACHES = (None, "dynamic")  # of keys and values
ALWAYS = {"do_sample": True, "num_return_sequences": 1, "use_cache": True}  # of other models' settings, these values


def renoises(model: Any) -> bool:
    """Whether a model fills canvases of noise and reads its own last predictions beside them."""
    return isinstance(model, PreTrainedModel) and inspect.signature(model.forward).parameters.keys() >= READS


class RenoiseTarget:
    """What is read of such a model before a call."""

    reads_sources = False
    hard_limit = None
    runtime = "transformers forward"

    def __init__(self, model: Any):
        text = model.config.text_config
        self.vocabulary, self.context = text.vocab_size, text.max_position_embeddings
        self.canvas = model.config.canvas_length


class AcceleratedRenoise(StandIn):
    """A `diffusion_gemma` hosted by truedraft; made by `accelerate`. Other attributes are the model's.

    Attributes:
        model: the model that was given, unchanged.
        target: its measures.
        strict: whether all rows stay in every pass, so that logits have the bits of the model's own `generate`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, draft: Any = "auto", rule: Any = None,
        runtime: str = "auto", strict: bool = False, layout: Any = None, view: Any = None,
    ):  # fmt: skip
        name = type(model).__name__
        if draft not in ("auto", "none", None):
            raise Refused(f"draft={draft!r} cannot be used with {name}: {AHEAD}; leave it out")
        for argument, value in {"rule": rule, "layout": layout, "view": view}.items():
            if value is not None:
                raise Refused(
                    f"{argument}={value!r} is for canvases with masks, and those of {name} are noise over the "
                    "vocabulary: leave it out"
                )
        check_runtime(runtime)
        self.model, self.tokenizer, self.strict = model, tokenizer, strict
        self.target = RenoiseTarget(model)
        self._complete()

    def __repr__(self) -> str:
        rows = "all rows in every pass" if self.strict else "rows leave when their canvas is complete"
        return (
            f"<{type(self).__name__} {type(self.model).__name__}: {self.model.num_parameters():,} parameters; {rows}>"
        )

    def generate(
        self, inputs: Tensor | None = None, *, attention_mask: Tensor | None = None, streamer: Any = None,
        on_pass: Callable[[Pass], None] | None = None, on_read: Callable[[int, int], None] | None = None,
        seed: int | None = None, **given: Any,
    ) -> Tensor:  # fmt: skip
        """The text of the model's own `generate`.

        Args:
            inputs: (batch, length) prompt ids, padded at the left with their `attention_mask`.
            streamer: of `transformers`: receives complete canvases, and the likeliest tokens of each pass where it has
                `put_draft`.
            on_pass: called after every pass over canvases.
            on_read: called with the tokens of the prompts, twice, once they are read.
            seed: the text is that under `torch.manual_seed(seed)`; by default the noise is that of torch's generator.
            **given: `generation_config`, or its fields.

        Returns:
            (batch, length) token ids: `sequences` of the model's own `generate`, which are prompts and whole canvases.

        Raises:
            Refused: a setting that cannot be honoured, named before anything is computed.
        """
        inputs = given.pop("input_ids", None) if inputs is None else inputs
        with exclusive([self]), defaults(), self._reporting(), torch.no_grad():
            mask = _mask_of(inputs, attention_mask, self.target.vocabulary)
            assert inputs is not None
            settings = _settings_of(self.model, self.target, inputs.shape[1], given)
            if getattr(streamer, "_takes_logits", False):
                raise Refused(f"streamer: {type(streamer).__name__} takes logits, which are not kept: {OWN}")
            generator = None if seed is None else torch.Generator(inputs.device).manual_seed(seed_of(seed))
            denoiser = Denoiser(self.model, settings, inputs, mask, generator, self.strict)
            return self._decode(denoiser, streamer, on_pass, on_read)

    def _decode(self, denoiser: Denoiser, streamer: Any, on_pass: Any, on_read: Any) -> Tensor:
        watch, prompt = Stopwatch(), denoiser.ids
        self._report = report = self._new_report(watch)
        denoiser.read = watch.timed("prefill", denoiser.read)  # type: ignore[method-assign]
        denoiser.score = watch.timed("target", denoiser.score)  # type: ignore[method-assign]
        steps = denoiser.steps()
        advance = watch.timed_steps(lambda: next(steps, None))
        try:
            if streamer is not None:
                streamer.put(prompt.cpu())
            while (step := advance()) is not None:
                if not report.passes and on_read is not None:
                    on_read(prompt.numel(), prompt.numel())
                report.passes.append(_pass(step, denoiser.length))
                if streamer is not None and hasattr(streamer, "put_draft"):
                    streamer.put_draft(value=step.likeliest.cpu())
                if streamer is not None and step.last:
                    streamer.put(denoiser.ids[:, -denoiser.length :].cpu())
                if on_pass is not None:
                    on_pass(report.passes[-1])
        finally:
            if streamer is not None:
                streamer.end()
        return denoiser.ids

    def _new_report(self, watch: Stopwatch) -> Report:
        dtype = str(self.model.dtype).removeprefix("torch.")
        ties = "to the bit" if self.strict else f"up to ties of {dtype}"
        return Report(
            "none", "entropy-bound", "tokens", "none", self.target.runtime, [AHEAD], seconds=watch.seconds,
            reference=f"the model's own generate under the same seed, {ties}", dtype=dtype,
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedRenoise:
        """A deep copy of the model, accelerated in the same way."""
        copied = AcceleratedRenoise(copy.deepcopy(self.model, memo), self.tokenizer, strict=self.strict)
        memo[id(self)] = copied
        return copied


def _pass(step: Step, width: int) -> Pass:
    return Pass(width, tuple(Emission(row, step.texts.get(row, ()), 0, 0) for row in step.rows))


def _settings_of(model: Any, target: RenoiseTarget, prompt: int, given: Mapping[str, Any]) -> Settings:
    """The settings of a call, by the model's own reading of them.

    prompt: length of the prompts.

    Raises:
        Refused: an unknown argument, or a value that cannot be honoured; the message gives the remedy.
    """
    name = type(model).__name__
    if given.get("return_dict_in_generate"):
        raise Refused("return_dict_in_generate=True: the ids alone are returned, and figures by report(); leave it out")
    try:
        config, unknown = model._prepare_generation_config(**{"generation_config": None, **given})
    except ValueError as error:
        raise Refused(f"{name}: {error}") from error
    for setting, value in unknown.items():
        if value is None or value == ALWAYS.get(setting):
            continue
        if setting == "do_sample":
            raise Refused(f"do_sample={value!r}: {name} samples always; leave it out, or give True (--sample)")
        near = difflib.get_close_matches(setting, vars(config), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"leave it out, or {OWN}"
        raise Refused(f"{setting}={value!r:.40} is no setting of canvases of noise over the vocabulary: {hint}")
    for setting in NEEDED:
        if getattr(config, setting) is None:
            raise Refused(f"{setting} is None in this {type(config).__name__}: give it a value, or {OWN}")
    if config.cache_implementation not in CACHES:
        raise Refused(
            f"cache_implementation={config.cache_implementation!r}: keys and values are kept in a dynamic cache; give "
            f"'dynamic', or {OWN}"
        )
    _, new = model._prepare_generated_length(config, prompt)
    if new < 1:
        raise Refused(f"max_length={config.max_length} leaves no room after {prompt} prompt tokens: raise it")
    size = target.canvas
    canvases = math.ceil(new / size)
    check_fits(prompt, f"{canvases} canvases of {size}", prompt + canvases * size, target.context)
    ends = config.eos_token_id
    ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    return Settings(
        config.max_denoising_steps, config.sampler_config.entropy_bound, config.t_min, config.t_max,
        config.stability_threshold, config.confidence_threshold, canvases, config.max_length, ends, config.pad_token_id,
    )  # fmt: skip


def _mask_of(inputs: Any, mask: Any, vocabulary: int) -> Tensor:
    """(B, L) bool: which tokens of the prompts are no padding; raises Refused where they are no prompts."""
    check_inputs(inputs, mask)
    if not 0 <= int(inputs.min()) <= int(inputs.max()) < vocabulary:
        raise Refused(f"inputs: there are token ids outside the model's vocabulary of {vocabulary}")
    return torch.ones_like(inputs, dtype=torch.bool) if mask is None else mask.bool()
