"""Continuous batching of diffusion models: requests enter and leave a running batch of canvases between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.call.surroundings import defaults, exclusive
from truedraft.canvas._base import CanvasRow, Policy, Speculator
from truedraft.canvas.control import CanvasControl
from truedraft.canvas.engine import CanvasEngine
from truedraft.canvas.predicting import Chooser
from truedraft.canvas.settings import prompts_of, row_of, settings_of
from truedraft.canvas.targets import CanvasTarget
from truedraft.errors import Refused
from truedraft.stats import Emission, Pass, Report
from truedraft.stopwatch import Stopwatch

Reason = Literal["stop", "length", "abort"]


class CanvasRequest:
    """A request of one row; made by `ContinuousCanvas.add_request`.

    Attributes:
        finish_reason: "stop" (an end token or a stop string), "length", "abort", or None while it waits or runs.
    """

    error = logprobs = None  # there are none: parts of requests are of this package, and log-probabilities are refused
    cached_tokens = 0  # of prompts that were not computed

    def __init__(self, row: CanvasRow, chooser: Chooser, drafting: bool, report: Report):
        self.finish_reason: Reason | None = None
        self._row, self._chooser, self._drafting, self._report = row, chooser, drafting, report

    @property
    def tokens(self) -> list[int]:
        """The new token ids that are known without a gap, up to the end of the text."""
        return self._row.text

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def report(self) -> Report:
        """Figures of its passes so far."""
        return self._report


class ContinuousCanvas:
    """A running batch of requests, each with settings of its own; made by `AcceleratedCanvas.engine`.

    Used as `ContinuousEngine`. Text: that of `generate` for the request alone. Prompts are read whole when a request
    begins.

    Args:
        target: of this engine alone.
        new_report: makes the report of a request.
        max_rows: requests that run at once.
        max_tokens: most tokens of a request, prompt and output together.

    Raises:
        Refused: the cache does not fit in memory.
    """

    def __init__(
        self, target: CanvasTarget, policy: Policy, speculator: Speculator | None, control: CanvasControl,
        tokenizer: PreTrainedTokenizerBase | None, new_report: Callable[[Stopwatch], Report], max_rows: int,
        max_tokens: int, canvases: int,
    ):  # fmt: skip
        self.target, self.max_rows, self.max_tokens = target, max_rows, max_tokens
        self._tokenizer, self._new_report, self._watch = tokenizer, new_report, Stopwatch()
        if speculator is not None:
            control.open(target, max_tokens)
        target.causal_cache = policy.causal_cache
        block = target.layout.block
        target.reserve(max_rows, (max_tokens // block + 1) * block, canvases)
        self._engine = CanvasEngine(target, policy, speculator, control)
        self._engine.time(self._watch)
        self._waiting: deque[CanvasRequest] = deque()
        self._running: list[CanvasRequest] = []  # by slot

    preemptions = 0  # each slot has all of its memory

    @property
    def kv_cache_usage(self) -> float:
        """Share of the memory for keys and values that running requests hold, 0 to 1."""
        return len(self._running) / self.max_rows

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def room(self) -> int:
        """Requests that could still begin with the next step."""
        return self.max_rows - len(self._running) - len(self._waiting)

    def add_request(
        self, input_ids: Tensor, *, draft: str | None = "default", sequence: int = 0, namespace: str = "",
        references: None = None, logprobs: None = None, attention_mask: Tensor | None = None, **given: Any,
    ) -> CanvasRequest:  # fmt: skip
        """Add a request; it begins with the next step for which there is a slot.

        Args:
            input_ids: (1, length) token ids of the prompt.
            draft: "default", or None for one canvas per pass.
            sequence: the text is that of this row of `generate(seed=seed, num_return_sequences=...)`.
            namespace: of no consequence: nothing is kept from one request to another.
            **given: arguments of `AcceleratedCanvas.generate`, without `block_length` and `steps`.

        Raises:
            Refused: a setting that cannot be honoured, a prompt of several rows, or more than `max_tokens`.
        """
        if references is not None or logprobs is not None:
            raise Refused("references and logprobs are for autoregressive models: leave them out for a diffusion model")
        with exclusive([self]), defaults():
            if self.target.changed:
                raise Refused("the model was changed since the engine was made: close it, and make another one")
            layout = self.target.layout
            prompts = prompts_of(input_ids, attention_mask, layout, self.target.vocabulary)
            settings = settings_of(self.target.model, layout, len(prompts[0]), given, self._tokenizer)
            if settings.layout != layout or settings.tokens is not None or len(prompts) * settings.count != 1:
                raise Refused("block_length and steps are the engine's, and a request has one row: leave them out")
            if (most := len(prompts[0]) + settings.new) > self.max_tokens:
                raise Refused(
                    f"{most} tokens of prompt and output are more than max_tokens={self.max_tokens}: lower "
                    "max_new_tokens, or make an engine with more"
                )
            row = row_of(prompts[0], settings, sequence, self.target.context)
            request = CanvasRequest(row, settings.chooser, draft is not None, self._new_report(Stopwatch()))
            self._waiting.append(request)
        return request

    @torch.no_grad()
    def step(self) -> Sequence[CanvasRequest]:
        """One pass over all requests that have a slot; returns these, also where they have no new tokens.

        Raises:
            BaseException: from the target or the control; the engine is closed.
        """
        with exclusive([self]), defaults():
            try:
                while self._waiting and len(self._running) < self.max_rows:
                    request = self._waiting.popleft()
                    self._engine.admit([request._row], request._chooser, request._drafting)
                    self._running.append(request)
                ran = list(self._running)
                if ran:
                    self._passed(ran, self._engine.step())
            except BaseException:
                self.close()
                raise
        return ran

    def _passed(self, ran: Sequence[CanvasRequest], done: Pass) -> None:
        for request, e in zip(ran, done.emitted, strict=True):
            drafted = min(e.drafted, len(e.tokens))
            request.report().passes.append(Pass(done.width, (Emission(e.row, e.tokens, drafted, e.offered),)))
            if request._row.finished:
                request.finish_reason = "stop" if request._row.ended else "length"
        self._running = [self._request(row) for row in self._engine.rows]

    def _request(self, row: CanvasRow) -> CanvasRequest:
        return next(request for request in self._running if request._row is row)

    def abort_request(self, request: CanvasRequest) -> None:
        """End a request after the tokens that it has emitted; no effect on a finished one."""
        with exclusive([self]):
            if request.finished:
                return
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                self._engine.release(self._running.index(request))
            request.finish_reason = "abort"
            self._running = [self._request(row) for row in self._engine.rows]

    def close(self) -> None:
        """Abort unfinished requests, and free the cache."""
        for request in (*self._waiting, *self._running):
            request.finish_reason = request.finish_reason or "abort"
        self._waiting.clear()
        self._running.clear()
        self._engine.rows.clear()
        self.target.free()
