"""Ways of generating that are compared: `transformers`, and accelerated models; the clock that each reports to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from truedraft import registry
from truedraft.accelerated import Accelerated, accelerate
from truedraft.bench.workloads import Item
from truedraft.canvas.accelerated import AcceleratedCanvas
from truedraft.canvas.layout import Layout
from truedraft.stats import Pass, Report
from truedraft.targets.kinds import prompt_length


@dataclass
class Clock(BaseStreamer):
    """Times of new tokens: (seconds since the start, tokens of all rows) for each arrival, and the largest memory."""

    start: float = field(default_factory=time.perf_counter)
    stamps: list[tuple[float, int]] = field(default_factory=list)
    peak: int = 0
    _prompt: bool = True

    def tick(self, tokens: int) -> None:
        self.stamps.append((time.perf_counter() - self.start, tokens))
        self.peak = max(self.peak, psutil.Process().memory_info().rss)

    def put(self, value: Tensor) -> None:
        """The streamer interface of transformers, which passes the prompt first."""
        if not self._prompt:
            self.tick(value.numel())
        self._prompt = False

    def end(self) -> None:
        """Nothing is buffered."""

    def on_pass(self, done: Pass) -> None:
        """The `on_pass` callback of truedraft."""
        if done.emitted:
            self.tick(sum(len(e.tokens) for e in done.emitted))


NO_DRAFTS = "no drafts"
Run = Callable[[dict[str, Any], dict[str, Any], Sequence[Item], Clock], tuple[Tensor, Report | None]]


@dataclass(frozen=True)
class Side:
    """A way of generating.

    run: (inputs, settings, items, clock) -> (batch, new) token ids and, from truedraft, the report.
    fast: the accelerated model, where one generates.
    fresh: called before every round: clears what was learnt in the one before, which had the same prompts.
    """

    name: str
    run: Run
    fresh: Callable[[], None] = lambda: None
    fast: Accelerated | AcceleratedCanvas | None = None

    @property
    def undrafted(self) -> bool:
        """Whether it is an accelerated model without drafts."""
        if isinstance(self.fast, AcceleratedCanvas):
            return self.fast.speculator is None and not self.lossy
        return self.fast is not None and not self.fast.drafter.width

    @property
    def lossy(self) -> bool:
        """Whether it is a diffusion model under a view, which writes another text by choice."""
        return isinstance(self.fast, AcceleratedCanvas) and self.fast.view is not None

    @property
    def coarse(self) -> bool:
        """Whether it is an accelerated model in a dtype below fp32."""
        return self.fast is not None and self.fast.target.dtype.itemsize < torch.float32.itemsize


def transformers_side(name: str, model: Any, **extra: Any) -> Side:
    """`model.generate`, with `extra` arguments (its own prompt lookup, an assistant)."""

    def run(inputs: dict[str, Any], settings: dict[str, Any], _: Sequence[Item], clock: Clock) -> tuple[Tensor, None]:
        out = model.generate(**inputs, **settings, **extra, streamer=clock)
        return _new(out, inputs, model), None

    return Side(name, run)


def truedraft_side(name: str, fast: Accelerated) -> Side:
    """An accelerated model; documents are passed to drafters that use them."""

    def run(
        inputs: dict[str, Any], settings: dict[str, Any], items: Sequence[Item], clock: Clock
    ) -> tuple[Tensor, Report]:
        given: dict[str, Any] = {}
        if fast.drafter.takes_references and any(item.references for item in items):
            given["references"] = [list(item.references) for item in items]
        out = fast.generate(**inputs, **settings, **given, on_pass=clock.on_pass)
        return _new(out, inputs, fast.model), fast.report()

    return Side(name, run, fast.forget, fast)


def _canvas_side(name: str, fast: AcceleratedCanvas, alone: bool = False) -> Side:
    """An accelerated diffusion model; alone: it stands for the model itself."""

    def run(inputs: dict[str, Any], settings: dict[str, Any], _: Sequence[Item], clock: Clock) -> tuple[Tensor, Report]:
        out = fast.generate(**inputs, **settings, on_pass=clock.on_pass)
        return _new(out, inputs, fast.model), fast.report()

    return Side(name, run, fast=None if alone else fast)


def canvas_sides(
    model: Any, tokenizer: Any, drafts: Sequence[str], control: str, views: Sequence[str] = (),
    layout: Layout | None = None,
) -> list[Side]:  # fmt: skip
    """Ways of a diffusion model: its own forward per step of decoding, the fastest pass per step, drafts, and views.

    layout: how it reads a canvas, if not as it declares.
    """

    def fast(draft: str | None, runtime: str = "auto", view: str | None = None) -> Any:
        return accelerate(model, tokenizer, draft=draft, control=control, runtime=runtime, view=view, layout=layout)

    sides = [_canvas_side("its own forward", fast(None, "stock"), alone=True), _canvas_side(NO_DRAFTS, fast(None))]
    sides += [_canvas_side(draft, fast(draft)) for draft in drafts if draft != registry.NONE]
    return sides + [_canvas_side(view, fast(None, view=view)) for view in views]


def _new(out: Tensor, inputs: dict[str, Any], model: Any) -> Tensor:
    """New tokens."""
    return out[:, prompt_length(model.config, inputs["input_ids"]) :]
