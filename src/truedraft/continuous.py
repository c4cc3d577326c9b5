"""Requests that come and go while others run: continuous batching, driven a step at a time."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft import reports
from truedraft.accept._base import Rule
from truedraft.arguments import Document, check_arguments, check_settings, with_stop_strings
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.engine import Engine
from truedraft.errors import Refused
from truedraft.parts import drafter_of, fitted, part, rule_for
from truedraft.prepared import Call, Prepared, request_of
from truedraft.request import Request
from truedraft.stats import Report, Stopwatch
from truedraft.streaming import Stream
from truedraft.surroundings import defaults, exclusive
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.hosting import hosted

DRAFTS = 256  # positions beyond a row's tokens, for drafts and probes

Reason = Literal["stop", "length", "abort"]


class EngineRequest:
    """A request of one row; made by `ContinuousEngine.add_request`.

    Attributes:
        seed: what the noise of its tokens is drawn from, with their positions.
        finish_reason: "stop" (an end-of-text token or another stopping criterion), "length" (as many tokens as it may
            have), "abort", or None while it waits or runs.
    """

    def __init__(self, request: Request, seed: int, streamer: Any, report: Report):
        self.seed = seed
        self.finish_reason: Reason | None = None
        self._request, self._streamer, self._report = request, streamer, report
        self._stream = Stream(streamer, request.rows, request.history)

    @property
    def _row(self) -> Any:
        return self._request.rows[0]

    @property
    def tokens(self) -> list[int]:
        """The token ids that it has emitted, the prompt left out."""
        row = self._row
        return row.tokens[row.prompt : row.end]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def report(self) -> Report:
        """Figures of the passes that it took part in; times are those since it was admitted, whoever else ran."""
        return self._report

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self._request.passes else "waiting")
        return f"<EngineRequest {state}: {len(self.tokens)} tokens>"


class ContinuousEngine:
    """A running batch of requests with settings of their own; made by `Accelerated.engine`.

    A request's text is the one that `generate` gives it alone, whoever runs beside it and whenever it came: greedy, or
    sampled with the same `seed`. Requests for which there is no slot wait for one, first come first served.

    One thread may call it at a time. `close` it, or use it in a `with` block.

    Args:
        max_rows: requests that run at once.
        max_tokens: of a request's prompt and output together, at most.

    Raises:
        Refused: the sizes make no sense, the model is an encoder-decoder, or the cache does not fit in memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        drafter: Drafter,
        rule: str | Rule | None,
        control: Control,
        hosting: tuple[str, bool],
        max_rows: int,
        max_tokens: int,
    ):
        for name, value, least in (("max_rows", max_rows, 1), ("max_tokens", max_tokens, 2)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise Refused(f"{name}={value!r}: give an integer of {least} or more")
        if model.config.is_encoder_decoder:
            raise Refused("engine() is for decoder language models, and this is an encoder-decoder: call generate()")
        self.model, self.tokenizer = model, tokenizer
        self.max_rows, self.max_tokens = max_rows, max_tokens
        self._drafter, self._rule = drafter, rule
        self._target: DecoderTarget = hosted(model, *hosting)
        with defaults():
            self._target.reserve(max_rows, max_tokens + DRAFTS)
        self._engine: Engine | None = Engine(self._target, control, Stopwatch())
        self._waiting: deque[EngineRequest] = deque()
        self._running: dict[int, tuple[EngineRequest, float]] = {}  # by the request's identity, and since when

    def __enter__(self) -> ContinuousEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def room(self) -> int:
        """Requests that could begin with the next step."""
        return self.max_rows - len(self._running) - len(self._waiting)

    def add_request(
        self,
        input_ids: Tensor,
        *,
        draft: str | Drafter | None = "default",
        rule: str | Rule | None = None,
        seed: int | None = None,
        references: Sequence[Document] | None = None,
        namespace: str = "",
        streamer: Any = None,
        **kwargs: Any,
    ) -> EngineRequest:
        """A request, which begins with the next step for which there is a slot.

        Args:
            input_ids: (1, length) or (length,) token ids of the prompt.
            draft: a drafter, its name, or None for none; by default the drafter of the accelerated model.
            rule: an acceptance rule or its name; by default that of the accelerated model.
            seed: noise comes from (seed, position); drawn from torch's stream where it is not given.
            references, namespace: as in `generate`.
            streamer: is given the prompt at once, tokens as they are emitted, and ended with the request.
            **kwargs: what `model.generate` takes.

        Raises:
            Refused: a setting that cannot be honoured exactly, a prompt of several rows, or one that does not fit with
                the tokens that it may emit.
        """
        engine = self._open()
        ids = input_ids[None] if isinstance(input_ids, Tensor) and input_ids.dim() == 1 else input_ids
        if isinstance(ids, Tensor) and len(ids) != 1:
            raise Refused(f"input_ids has {len(ids)} rows: add a request for each")
        seed = int(torch.randint(2**62, (1,))) if seed is None else seed
        call = Call(references=references, seed=[seed], namespace=namespace, streamer=streamer)
        target = self._target

        def prepare(
            model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
            **inputs: Any,
        ) -> EngineRequest:  # fmt: skip
            check_settings(generation_config)
            prepared = Prepared(input_ids, logits_processor, stopping_criteria, generation_config, inputs)
            if prepared.returns:
                raise Refused("return_dict_in_generate: a request has its tokens alone; leave it out")
            drafter = fitted(self._drafter if draft == "default" else drafter_of(draft), target, self.tokenizer)
            judge = rule_for(self._judge(rule), bool(generation_config.do_sample), drafter)

            def check(rows: int, tokens: int) -> None:
                self._check(tokens, drafter.width + judge.extra(drafter.width))

            request = request_of(prepared, call, target, self.tokenizer, drafter, judge, "keep", check)
            report = reports.begun(target, drafter, judge, engine.control, {"all": 0.0})
            report.passes = request.passes
            return EngineRequest(request, seed, streamer, report)

        with exclusive([self, self._drafter]), defaults():
            check_arguments(target, ids, kwargs)
            if target.changed:
                raise Refused("the model was changed since the engine was made: close it, and make another one")
            kwargs = with_stop_strings(target.encoded(ids, kwargs), self.model, self.tokenizer)
            generate: Any = self.model.generate
            made: EngineRequest = generate(ids, custom_generate=prepare, streamer=streamer, **kwargs)
        self._waiting.append(made)
        return made

    @torch.no_grad()
    def step(self) -> list[EngineRequest]:
        """One pass: over the prompts of requests for which a slot has become free, or over all that run.

        Returns:
            The requests that have new tokens.
        """
        engine = self._open()
        for _ in range(min(len(self._waiting), self.max_rows - len(self._running))):
            request = self._waiting.popleft()
            self._running[id(request._request)] = request, time.perf_counter()
            engine.admit(request._request)
        if not engine.running:
            return []
        drafters = [request._request.drafter for request, _ in self._running.values()]
        try:
            with exclusive([self, *drafters]), defaults():
                moved = [self._running[id(request)][0] for request in engine.step()]
        except BaseException:
            self.close()
            raise
        for request in moved:
            self._moved(request)
        return moved

    def abort_request(self, request: EngineRequest) -> None:
        """End a request where it is; nothing happens to one that is finished."""
        if not request.finished:
            if request in self._waiting:
                self._waiting.remove(request)
            else:
                self._open().cancel(request._request)
            self._finish(request, "abort")

    def close(self) -> None:
        """Abort what is unfinished, and free the cache."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            try:
                engine.close()
            finally:
                for request in [*self._waiting, *(request for request, _ in self._running.values())]:
                    self._finish(request, "abort")
                self._waiting.clear()
                self._target.cache = None

    def _open(self) -> Engine:
        if self._engine is None:
            raise Refused("the engine is closed: make another one with engine()")
        return self._engine

    def _check(self, tokens: int, drafts: int) -> None:
        """Raises Refused where a request, or a draft at its end, is longer than there is room for."""
        if tokens > self.max_tokens:
            raise Refused(
                f"{tokens} tokens of prompt and output are more than max_tokens={self.max_tokens} of the engine: lower "
                "max_new_tokens, or make an engine with more"
            )
        if tokens + drafts > self.max_tokens + DRAFTS:
            raise Refused(
                f"drafts of {drafts} nodes may not fit behind {tokens} tokens: give a drafter of fewer, or make an "
                f"engine with max_tokens={tokens + drafts - DRAFTS}"
            )

    def _judge(self, rule: str | Rule | None) -> Rule | None:
        """A rule of a request's own: some keep what they saw of the pass under way."""
        given = self._rule if rule is None else rule
        if given is None or isinstance(given, str):
            return None if given is None else part(given, "accept", Rule)
        return copy.copy(part(given, "accept", Rule))

    def _moved(self, request: EngineRequest) -> None:
        report, since = request.report(), self._running[id(request._request)][1]
        report.seconds["all"] = time.perf_counter() - since
        request._stream.put()
        row = request._row
        if row.ended:
            stopped = row.tokens[row.end - 1] in row.ends or request._request.stops.met(row)
            self._finish(request, "stop" if stopped or row.end - row.prompt < row.room else "length")

    def _finish(self, request: EngineRequest, reason: Reason) -> None:
        request.finish_reason = reason
        self._running.pop(id(request._request), None)
        reports.ended(request.report(), self._target, request._request.rule)
        if request._streamer is not None:
            request._streamer.end()
