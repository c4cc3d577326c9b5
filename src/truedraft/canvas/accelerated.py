"""`accelerate(model)` for diffusion language models: the text of step-by-step decoding in fewer passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft import registry
from truedraft.call.surroundings import defaults, exclusive
from truedraft.canvas._base import CanvasRow, Policy, Speculator
from truedraft.canvas.continuous import ContinuousCanvas
from truedraft.canvas.control import CanvasControl, CanvasCosts, FixedCanvases
from truedraft.canvas.engine import CanvasEngine
from truedraft.canvas.hosting import hosted_canvas
from truedraft.canvas.layout import Layout
from truedraft.canvas.settings import Settings, prompts_of, row_of, settings_of, with_tokens
from truedraft.canvas.views._base import CanvasView
from truedraft.card import Guarantee, lacking, method_name
from truedraft.errors import Refused
from truedraft.standin import StandIn
from truedraft.stats import Pass, Report
from truedraft.stopwatch import Stopwatch

REFERENCE, SPECULATOR = "low-confidence", "lattice"
MOST = 64  # most canvases of a row in a pass besides its own


@dataclass(frozen=True)
class Hooks:
    """Functions that are called during a call; see `AcceleratedCanvas.generate`."""

    streamer: Any
    on_pass: Callable[[Pass], None] | None
    on_read: Callable[[int, int], None] | None
    on_canvas: Callable[[list[CanvasRow]], None] | None

    def read(self, rows: list[CanvasRow]) -> None:
        """The prompts are read."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor(rows[0].canvas.tokens[: rows[0].prompt]))
        if self.on_read is not None:
            total = sum(row.prompt for row in rows)
            self.on_read(total, total)

    def passed(self, done: Pass, rows: list[CanvasRow]) -> None:
        """A pass is complete."""
        if self.streamer is not None:
            for token in done.emitted[0].tokens:
                self.streamer.put(torch.tensor([token]))
        if self.on_pass is not None:
            self.on_pass(done)
        if self.on_canvas is not None:
            self.on_canvas(rows)

    def end(self) -> None:
        """The call ends, also by an error."""
        if self.streamer is not None:
            self.streamer.end()


class AcceleratedCanvas(StandIn):
    """A diffusion language model with a faster `generate`; made by `accelerate`. Other attributes are the model's.

    Attributes:
        model: the model that was given, unchanged.
        target, speculator, policy: the parts in use; speculator is None for one step per pass.
        view: that all passes are made under, or None.
        layout: how the model reads a canvas.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, draft: Any,
        rule: Any, control: Any, runtime: str, strict: bool, layout: Layout, view: Any = None,
    ):  # fmt: skip
        self.model, self.tokenizer, self.layout = model, tokenizer, layout
        self.policy: Policy = part(rule or REFERENCE, "canvas.policies", Policy)
        self.view = None if view is None else _view(view, self.policy)
        if draft == "auto":
            draft = None if self._lossy else SPECULATOR
        self.speculator: Speculator | None = None
        if draft is not None and draft != "none":
            self.speculator = part(draft, "canvas.speculators", Speculator)
            if self._lossy:
                raise Refused(
                    f"draft={method_name(self.speculator)!r} verifies step-by-step decoding, which "
                    f"{' and '.join(self._lossy)} replaces: drop one of them"
                )
        self._hosting = layout, runtime, strict, self.view
        self.target = hosted_canvas(model, *self._hosting)
        self.policy.bind(self.target.vocabulary, layout, tokenizer)
        fixed = control == "fixed" or bool(self._lossy)
        self.control: CanvasControl = FixedCanvases() if fixed else CanvasCosts()
        self._complete()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {type(self.model).__name__}: {self.model.num_parameters():,} parameters; drafter "
            f"{self._drafter}, rule {self._rule}; passes by {self.target.runtime}>"
        )

    @property
    def _drafter(self) -> str:
        return "none" if self.speculator is None else method_name(self.speculator)

    @property
    def _rule(self) -> str:
        return f"{'lossy/' if self.policy.guarantee == 'none' else ''}{method_name(self.policy)}"

    @property
    def _lossy(self) -> list[str]:
        """What makes the text another than that of step-by-step decoding."""
        found = [self._rule] if self.policy.guarantee == "none" else []
        return found if self.view is None else [*found, self.view.lossy]

    @property
    def _guarantee(self) -> Guarantee:
        return "none" if self._lossy else self.policy.guarantee

    def generate(
        self, inputs: Tensor | None = None, *, attention_mask: Tensor | None = None, streamer: Any = None,
        on_pass: Callable[[Pass], None] | None = None, on_read: Callable[[int, int], None] | None = None,
        on_canvas: Callable[[list[CanvasRow]], None] | None = None, references: Any = None, **given: Any,
    ) -> Tensor:  # fmt: skip
        """The text of step-by-step decoding, in fewer passes.

        Args:
            inputs: (batch, length) prompt ids; left-padded batches with their `attention_mask`.
            streamer: of `transformers`, for one row: receives tokens as soon as all before them are known.
            on_pass: called after every pass.
            on_read: called once the prompts are read, with their tokens, twice.
            on_canvas: called after every pass with the rows, finished ones included.
            **given: `generation_config`, its fields where they have a meaning for single positions, and `block_length`
                (the model's own by default), `steps` (of decoding, as models count them; by default one per position)
                and `seed` (of sampling; by default from torch's generator).

        Returns:
            (batch, length) token ids: prompts and new tokens, padded at the right.

        Raises:
            Refused: a setting that cannot be honoured, named before anything is computed.
        """
        inputs = given.pop("input_ids", None) if inputs is None else inputs
        with exclusive([self]), defaults(), self._reporting(), torch.no_grad():
            if references is not None:
                raise Refused("references are for autoregressive models: leave them out for a diffusion model")
            if self.target.changed:
                self.target = hosted_canvas(self.model, *self._hosting)
            prompts = prompts_of(inputs, attention_mask, self.layout, self.target.vocabulary)
            settings = settings_of(self.model, self.layout, max(map(len, prompts)), given, self.tokenizer)
            prompts = [prompt for prompt in prompts for _ in range(settings.count)]
            if streamer is not None and len(prompts) > 1:
                raise Refused(f"streamer: one text can be streamed, and there are {len(prompts)} rows")
            rows = [row_of(prompt, settings, i, self.target.context) for i, prompt in enumerate(prompts)]
            hooks = Hooks(streamer, on_pass, on_read, on_canvas)
            self._decode(rows, settings, hooks)
            assert inputs is not None
            return output(inputs, rows, settings)

    def _decode(self, rows: list[CanvasRow], settings: Settings, hooks: Hooks) -> None:
        policy, watch = with_tokens(self.policy, settings.tokens), Stopwatch()
        self.target.layout, self.target.causal_cache = settings.layout, policy.causal_cache
        self._report = report = self._new_report(watch)
        if self.speculator is not None:
            begin = watch.timed_steps(watch.timed("measure", self.control.open))
            begin(self.target, max(row.new for row in rows))
        self.target.reserve(len(rows), max(len(row.canvas) for row in rows), self._canvases)
        engine = CanvasEngine(self.target, policy, self.speculator, self.control)
        engine.time(watch)
        advance = watch.timed_steps(engine.step)
        try:
            watch.timed_steps(watch.timed("prefill", engine.admit))(rows, settings.chooser)
            hooks.read(rows)
            while engine.running:
                report.passes.append(advance())
                hooks.passed(report.passes[-1], rows)
        finally:
            self.target.free()
            self.target.layout = self.layout
            hooks.end()

    @property
    def _canvases(self) -> int:
        """Most canvases of a row in a pass besides its own."""
        return getattr(self.speculator or self.policy, "canvases", MOST if self.speculator else 0)

    def engine(self, max_rows: int, max_tokens: int, *_: Any) -> ContinuousCanvas:
        """A running batch of requests, with a control of its own; see `ContinuousCanvas`. Its prompts are read whole,
        and no prefixes are kept."""
        target = hosted_canvas(self.model, *self._hosting)
        return ContinuousCanvas(
            target, self.policy, self.speculator, type(self.control)(), self.tokenizer, self._new_report, max_rows,
            max_tokens, self._canvases,
        )  # fmt: skip

    @property
    def names(self) -> tuple[str, str]:
        """The drafter's name, and the guarantee."""
        return self._drafter, self._guarantee

    def _new_report(self, watch: Stopwatch) -> Report:
        ties = "to the bit" if self.target.batch_invariant else f"up to ties of {_name(self.target.dtype)}"
        report = Report(
            self._drafter, self._rule, self._guarantee, self.control.name, self.target.runtime,
            dtype=_name(self.target.dtype), seconds=watch.seconds,
            reference="none" if self._lossy else f"step-by-step decoding, one canvas per pass, {ties}",
        )  # fmt: skip
        parts = [one for one in (self.speculator, self.policy, self.view) if one is not None]
        report.notes += [note for one in parts for note in lacking(one)]
        report.notes += [f"{name} is lossy: this is not the text of step-by-step decoding" for name in self._lossy]
        return report

    def __deepcopy__(self, memo: dict[int, Any]) -> AcceleratedCanvas:
        """A deep copy of the model, accelerated in the same way."""
        speculator, policy = copy.copy(self.speculator), copy.copy(self.policy)
        memo[id(self)] = copied = AcceleratedCanvas(
            copy.deepcopy(self.model, memo), self.tokenizer, speculator, policy, self.control.name, *self._hosting[1:3],
            self.layout, self.view,
        )  # fmt: skip
        return copied


def check_for_canvas(ties: str, control: Any) -> None:
    """Raises Refused for arguments of `accelerate` that have no meaning for diffusion models."""
    if ties != "keep":
        raise Refused(f"ties={ties!r} is for autoregressive models: leave it out")
    if control not in ("cost", "fixed"):
        raise Refused(f"control={control!r}: diffusion models have 'cost' and 'fixed'")


def _view(given: Any, policy: Policy) -> CanvasView:
    """The view of `lossy/NAME`, or one that was made already.

    Raises:
        Refused: it is none of diffusion models, or cannot serve this policy.
    """
    view = registry.load("canvas.views", registry.canvas_view(given)) if isinstance(given, str) else given
    if not isinstance(view, CanvasView):
        raise Refused(f"view={given!r}: give lossy/ and the name of a view of diffusion models (`truedraft methods`)")
    if getattr(policy, "canvases", 0):
        raise Refused(
            f"rule='lossy/{method_name(policy)}' scores several canvases in a pass, and view={view.lossy!r} keeps what "
            "one has stored: drop one of them"
        )
    view.check(policy)
    return view


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def part(given: Any, kind: str, base: type) -> Any:
    """A policy, speculator or drafter by its name, or one that was made already.

    Raises:
        Refused: it is neither, or the name is unknown.
    """
    if isinstance(given, str):
        return registry.load(kind, given)
    if isinstance(given, base):
        return given
    about = registry.KINDS[kind]
    raise Refused(f"{about.argument}={given!r}: give the name of a {about.noun} (`truedraft methods` lists them)")


def output(inputs: Tensor, rows: list[CanvasRow], settings: Settings) -> Tensor:
    """Prompts and the new tokens of their rows, padded at the right."""
    longest = max(len(row.text) for row in rows)
    new = torch.full((len(rows), longest), settings.pad, dtype=inputs.dtype)
    for line, row in zip(new, rows, strict=True):
        line[: len(row.text)] = torch.tensor(row.text, dtype=inputs.dtype)
    return torch.cat([inputs.repeat_interleave(settings.count, 0), new.to(inputs.device)], 1)
