"""Continuous batching: requests enter and leave a running batch between steps, which the caller makes."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from truedraft import reports
from truedraft.accept._base import Rule, extra_probes
from truedraft.caches.pool import SPARE, Pool
from truedraft.call.arguments import Document, check_arguments, check_settings, for_decode_loop, noise_of, sources_of
from truedraft.call.numbers import named
from truedraft.call.outcome import cut
from truedraft.call.prepared import Call, Prepared, request_of
from truedraft.call.surroundings import also_exclusive, defaults, exclusive
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter, Plain
from truedraft.drafters._compose import name_of
from truedraft.engine import Engine
from truedraft.engine_request import EngineRequest, Reason
from truedraft.errors import NoRoom, Refused, let_go, why
from truedraft.parts import check_references, drafter_of, fitted, part, parts_of, rule_for
from truedraft.reading import PiecewiseEngine, reuses
from truedraft.request import Request
from truedraft.stats import EngineReport, Totals
from truedraft.stopwatch import Stopwatch
from truedraft.targets.hosting import hosted
from truedraft.targets.pooling import UTILIZATION, check_memory, reserved
from truedraft.views._base import View

DRAFTS = 256  # positions of the cache beyond a row's tokens, for drafts and probes
PIECE_SECONDS = 0.05  # that a piece of prompts should take at most, while rows wait for it
WHOLE = (
    "the whole prompt is computed: hidden states or its log-probabilities are required, it is embeddings, or the model "
    "has states or a view"
)
CHECKING = 0.02  # most of the time that is spent on detecting, between steps, a model that was changed


class ContinuousEngine:
    """A running batch of requests, each with settings of its own; made by `Accelerated.engine`.

    Use: `add_request` at any time, `step` while `has_unfinished_requests()`, then `close`, or a `with` block.

    Text: that which `generate` returns for the request alone, greedy or sampled with the same `seed`; it does not
    depend on the other requests, nor on when it was added, nor on kept prefixes. Requests without a slot wait, first
    come first served.

    Memory: requests share that of one pool, and take of it as they grow. Where one can grow no further, the one that
    was added last gives its memory back, and is read again later, with the same text. Requests that cannot be read
    again begin once there is room for all of their tokens: under a view, of embeddings, of an encoder-decoder, and
    where the passes of drafts and of prompts round differently. Where slots take all of their memory from the start (on
    a GPU), there are as many as fit.

    Errors: an exception from a part of one request (processor, stopping criterion, streamer, rule, drafter) ends that
    request, with `finish_reason` "error"; one from a drafter that requests share ends those that it was called for. An
    exception from the target or the control, or Ctrl-C, is raised by `step` and closes the engine.

    Threads: calls from several threads take turns; a call within a call (from a streamer, a processor) is refused.

    Args:
        max_rows: most requests that run at once.
        max_tokens: most tokens of a request, prompt and output together; sources of an encoder-decoder are not counted.
        piece_seconds: that a piece of prompts should take at most, while rows wait for it.
        prefix_bytes: most bytes of keys and values kept for prompts with the same prefix; 0 for none.
        share_prefixes: whether requests of one namespace may reuse those of another.
        kv_cache_memory_bytes: most bytes of keys and values, of prefixes too, which give way to requests; by default
            what `memory_utilization` leaves.
        memory_utilization: share of the device's memory that may be in use, by whatever, once this is full.

    Attributes:
        preemptions: how often a request gave its memory back to be read again later.

    Raises:
        Refused: a size is of another type or out of range, or a request of `max_tokens` does not fit in memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        drafter: Drafter,
        rule: str | Rule | None,
        control: Control,
        hosting: tuple[str, bool, View | None],
        max_rows: int,
        max_tokens: int,
        piece_seconds: float = PIECE_SECONDS,
        prefix_bytes: int = 0,
        share_prefixes: bool = False,
        kv_cache_memory_bytes: int | None = None,
        memory_utilization: float = UTILIZATION,
    ):
        sizes = ("max_rows", max_rows, 1), ("max_tokens", max_tokens, 2), ("prefix_bytes", prefix_bytes, 0)
        for name, value, least in sizes:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise Refused(f"{name}={value!r}: give an integer of {least} or more")
        if isinstance(piece_seconds, bool) or not isinstance(piece_seconds, int | float) or not piece_seconds > 0:
            raise Refused(f"piece_seconds={piece_seconds!r}: give a number above 0, in seconds")
        check_memory(kv_cache_memory_bytes, memory_utilization)
        self.model, self.tokenizer = model, tokenizer
        self.max_tokens = max_tokens
        self._drafter, self._rule = drafter, rule
        self._target = hosted(model, *hosting)
        with defaults():
            self.max_rows, limit = reserved(
                self._target, max_rows, max_tokens, max_tokens + DRAFTS, prefix_bytes, kv_cache_memory_bytes,
                memory_utilization,
            )  # fmt: skip
            self._engine: Engine | None = self._made(control, piece_seconds, limit, prefix_bytes, share_prefixes)
        self._watch, self._control = Stopwatch(), control
        self._watch.attach(self._engine)
        self._step = self._watch.timed_steps(self._engine.step)
        self._totals = Totals()
        self._compared = (0.0, 0.0)  # time of the last check for changes, and its seconds
        self._added = 0  # requests since the last step
        self._lacking = False  # whether the request in front waits for memory
        self._plain = Plain()
        self._waiting: deque[EngineRequest] = deque()
        self._running: dict[int, tuple[EngineRequest, float]] = {}  # id(request) -> the request, time of admission

    def _made(self, control: Control, piece_seconds: float, limit: int, prefix_bytes: int, shared: bool) -> Engine:
        """The engine; those of encoder-decoders read prompts whole, and keep no prefixes."""
        piecewise = self._target.granularity is not None
        self._reuses = piecewise and prefix_bytes > 0  # prefixes, as far as the model allows it
        self._prefixes = self._target.prefixes(prefix_bytes, shared) if self._reuses else None
        self._pool = Pool(limit, self._target.position_bytes, self._prefixes)
        self._piecewise: PiecewiseEngine | None = None
        if not piecewise:
            return Engine(self._target, control)
        self._piecewise = PiecewiseEngine(self._target, control, piece_seconds, self._pool, self._prefixes)
        return self._piecewise

    def __enter__(self) -> ContinuousEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def room(self) -> int:
        """Requests that could still begin with the next step, as far as there is memory for them; 0 while one waits for
        memory, and negative where some wait for a slot."""
        free = self.max_rows - len(self._running) - len(self._waiting)
        return min(free, 0) if self._lacking else free

    @property
    def preemptions(self) -> int:
        return self._piecewise.preemptions if self._piecewise else 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the memory for keys and values that running requests hold, 0 to 1."""
        return self._pool.used / max(self._pool.limit, 1)

    def add_request(
        self,
        input_ids: Tensor,
        *,
        draft: str | Drafter | None = "default",
        rule: str | Rule | None = None,
        seed: int | None = None,
        sequence: int = 0,
        references: Sequence[Document] | None = None,
        namespace: str = "",
        streamer: Any = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **kwargs: Any,
    ) -> EngineRequest:
        """Add a request; it begins with the next step for which there is a slot.

        Args:
            input_ids: (1, length) or (length,) token ids of the prompt, or of the source of an encoder-decoder.
            draft: a drafter, its name, or None for none; by default the drafter of the accelerated model.
            rule: an acceptance rule or its name; by default that of the accelerated model.
            seed: of its noise, a function of (seed, sequence, position); by default from torch's generator.
            sequence: the text is that of this row of `generate(seed=seed, num_return_sequences=...)`.
            references, namespace: as in `generate`.
            streamer: receives the prompt at once and each token once it is emitted; ended with the request.
            logprobs: the likeliest tokens at each place of `EngineRequest.logprobs`; None for no log-probabilities.
            prompt_logprobs: the same of `EngineRequest.prompt_logprobs`, which are computed with the prompt; it is then
                read whole.
            **kwargs: arguments of `model.generate`.

        Raises:
            Refused: a setting that cannot be honoured exactly, a prompt of several rows, prompt and output longer than
                `max_tokens`, or a source for which there is no memory (`NoRoom`).
        """
        ids = self._one_row(input_ids, prompt_logprobs)
        seed = int(torch.randint(2**62, (1,))) if seed is None else seed
        call = Call(
            references=references, chance=noise_of(seed, sequence), namespace=namespace, streamer=streamer,
            sources=sources_of(ids, kwargs), logprobs=logprobs, prompt_logprobs=prompt_logprobs,
        )  # fmt: skip
        target, given = self._target, self._drafter_of(draft)

        def prepare(
            model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
            **inputs: Any,
        ) -> EngineRequest:  # fmt: skip
            check_settings(generation_config)
            prepared = Prepared(input_ids, logits_processor, stopping_criteria, generation_config, inputs)
            if prepared.returns:
                raise Refused("return_dict_in_generate: a request returns tokens alone; leave it out")
            drafter = fitted(given, target, self.tokenizer)
            verifier = rule_for(self._own_rule(rule), bool(generation_config.do_sample), drafter)
            check_references(references, drafter, verifier)
            if generation_config.prompt_lookup_num_tokens is not None:
                raise Refused("prompt_lookup_num_tokens selects a drafter: give draft='prompt-lookup' instead")

            check = partial(self._check, drafter.width + extra_probes(verifier, drafter.width))
            request = request_of(prepared, call, target, self.tokenizer, drafter, verifier, "keep", check)
            report = reports.new_report(target, drafter, verifier, self._control, {"all": 0.0})
            report.passes, report.drafted_by = request.passes, [row.drafted_by for row in request.rows]
            if self._reuses and (self._prefixes is None or not reuses(request)):
                report.notes.append(WHOLE)
            return EngineRequest(request, seed, streamer, report)

        with exclusive([self]), also_exclusive(parts_of([given])), defaults(), named(kwargs, self.model):
            self._open()
            if kwargs.get("assistant_model") is not None:
                raise Refused("assistant_model selects a drafter: give it as draft=")
            check_arguments(target, ids, kwargs)
            self._check_first()
            kwargs = for_decode_loop(target.encoded(ids, kwargs), self.model, self.tokenizer)
            generate: Any = self.model.generate
            added: EngineRequest = generate(ids, custom_generate=prepare, streamer=streamer, **kwargs)
            self._waiting.append(added)
        return added

    def _one_row(self, input_ids: Any, prompt_logprobs: int | None) -> Any:
        """The prompt as a batch of one row.

        Raises:
            Refused: it has several rows, or no log-probabilities.
        """
        ids = input_ids[None] if isinstance(input_ids, Tensor) and input_ids.dim() == 1 else input_ids
        if isinstance(ids, Tensor) and len(ids) != 1:
            raise Refused(f"input_ids has {len(ids)} rows: add a request for each")
        if prompt_logprobs is not None and self._target.granularity is None:
            raise Refused(
                f"prompt_logprobs={prompt_logprobs}: the encoder of this model reads the prompt, without "
                "probabilities of its tokens: leave it out"
            )
        return ids

    @torch.no_grad()
    def step(self) -> list[EngineRequest]:
        """Read a piece of the prompts of requests that have a slot, or make a pass over drafts of all rows; in turn,
        where there are both. Encoder-decoders read prompts whole.

        Returns:
            The requests that have new tokens, and those that ended.

        Raises:
            Refused: the model was changed, or this is a call within a call; nothing was computed.
            BaseException: from the target or the control, or an interruption; the engine is closed.
        """
        with exclusive([self]):
            engine = self._open()
            if self._added > 1 or time.perf_counter() > self._compared[0] + self._compared[1] / CHECKING:
                self._check_model()
            self._added = 0
            with self._changing():
                advanced = self._admit(engine)
                if engine.running:
                    ran = self._step()
                    self._totals.passes = engine.passes
                    for request in [self._running[id(request)][0] for request in ran]:
                        self._after_pass(request)
                        advanced.append(request)
        return advanced

    def abort_request(self, request: EngineRequest) -> None:
        """End a request after the tokens that it has emitted; no effect on a finished one.

        Raises:
            Refused: the request is one of another engine, or this is a call within a call.
        """
        with exclusive([self]):
            if not request.finished:
                engine = self._open()
                if request not in self._unfinished():
                    raise Refused("the request is one of another engine: abort it there")
                with self._changing():
                    if request in self._waiting:
                        self._waiting.remove(request)
                    else:
                        engine.cancel(request._request)
                    self._finish(request, "abort")

    def report(self) -> EngineReport:
        """Figures of all requests so far."""
        totals = copy.deepcopy(self._totals)
        running = list(self._running.values())  # a copy: another thread may change it
        for request, _ in running:
            totals.add(request.report())
        return EngineReport(
            self._target.runtime, name_of(self._control), totals, len(self._waiting), len(running),
            dict(self._watch.seconds), sum(not request._request.passes for request, _ in running),
            self._prefixes.bytes if self._prefixes else 0, self._pool.used, self._pool.limit, self.preemptions,
        )  # fmt: skip

    def close(self) -> None:
        """Abort unfinished requests, and free the cache."""
        with exclusive([self]):
            if self._engine is not None:
                with self._changing():
                    self._close()

    def _close(self) -> None:
        if self._engine is None:
            return
        try:
            self._engine.close()
        except BaseException:
            self._engine.close()  # completes a call that was interrupted
            raise
        finally:
            for request in self._unfinished():
                self._finish(request, request.finish_reason or "abort")
            self._waiting.clear()
            self._target.free()
            if self._prefixes is not None:
                self._prefixes.clear()
            self._engine = None

    def _unfinished(self) -> list[EngineRequest]:
        return list(dict.fromkeys([*self._waiting, *(request for request, _ in self._running.values())]))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Exclusive use of the drafters, which other models may share; an exception within closes the engine."""
        drafters = {id(request._request.drafter): request._request.drafter for request in self._unfinished()}
        with also_exclusive(parts_of([*drafters.values()])), defaults():
            try:
                for drafter in drafters.values():
                    fitted(drafter, self._target, self.tokenizer)  # it may have drafted in another call since
                yield
            except BaseException:
                self._close()
                raise

    def _open(self) -> Engine:
        if self._engine is None:
            raise Refused("the engine is closed: make another one with engine()")
        return self._engine

    def _check(self, drafts: int, rows: int, tokens: int) -> None:
        """Raises Refused where a request, or a draft at its end, does not fit in the cache."""
        if tokens > self.max_tokens:
            raise Refused(
                f"{tokens} tokens of prompt and output are more than max_tokens={self.max_tokens} of the engine: lower "
                "max_new_tokens, or make an engine with more"
            )
        if tokens + drafts > self.max_tokens + DRAFTS:
            raise Refused(
                f"drafts of {drafts} nodes may not fit after {tokens} tokens: give a drafter of fewer, or make an "
                f"engine with max_tokens={tokens + drafts - DRAFTS}"
            )

    def _drafter_of(self, draft: str | Drafter | None) -> Drafter:
        """The drafter of a request; one for all that have none, since drafters draft for all of their rows at once."""
        if draft is None:
            return self._plain
        return self._drafter if draft == "default" else drafter_of(draft)

    def _own_rule(self, rule: str | Rule | None) -> Rule | None:
        """A rule for one request alone: some rules have state of the text. None: that of `model.generate`."""
        given = self._rule if rule is None else rule
        if given is None or isinstance(given, str):
            return None if given is None else part(given, "accept", Rule)
        return copy.copy(part(given, "accept", Rule))

    def _check_first(self) -> None:
        """`_check_model` for the first request since the last step; the step checks for those that follow."""
        if not self._added:
            self._check_model()
        self._added += 1

    def _check_model(self) -> None:
        """Raises Refused where the model was changed since the engine was made."""
        start = time.perf_counter()
        if self._target.changed:
            raise Refused("the model was changed since the engine was made: close it, and make another one")
        now = time.perf_counter()
        self._compared = now, now - start

    def _admit(self, engine: Engine) -> list[EngineRequest]:
        """Admit waiting requests in order, as far as there are slots and memory; returns those that can never begin."""
        ended = []
        while self._waiting and len(self._running) < self.max_rows:
            request = self._waiting[0]
            if self._lacks_memory(request._request):
                break
            try:
                self._target.check_room(request._request.prompts)
            except NoRoom as error:
                if self._running:
                    break  # running requests may free memory
                request._request.error = error
                self._finish(request, "error")
                ended.append(request)
            else:
                self._running[id(request._request)] = request, time.perf_counter()
                engine.admit(request._request)
            self._waiting.popleft()
        return ended

    def _lacks_memory(self, request: Request) -> bool:
        """Grant a request the memory that it begins with: whether it has to wait for that."""
        row = request.rows[0]
        if self._prefixes is not None:
            self._prefixes.use(row.namespace, row.tokens)
        if self._piecewise is not None:
            self._lacking = not self._piecewise.grant(request)
        else:
            spare = SPARE if self._running else 0
            self._lacking = not self._pool.grant(request, row.prompt + row.room + request.reach, spare)
        return self._lacking

    def _after_pass(self, request: EngineRequest) -> None:
        """Feed the streamer of a request after a pass; finish the request if its row has ended or failed."""
        inner, row = request._request, request._row
        request.report().seconds["all"] = time.perf_counter() - self._running[id(inner)][1]
        reason: Reason | None = None
        try:
            request._stream.put()
            if row.ended:
                early = row.tokens[row.end - 1] in row.ends or row.end - row.prompt < row.room
                reason = "stop" if early or inner.stops.met(row) else "length"
        except Exception as error:
            inner.error = inner.error or error
        if inner.error is not None:
            self._open().cancel(inner)
            reason = "error"
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: EngineRequest, reason: Reason) -> None:
        request.finish_reason = reason
        report, inner = request.report(), request._request
        try:
            if request._streamer is not None:
                request._streamer.end()
            reports.complete(report, self._target, inner.rule)
        except Exception as error:
            inner.error = inner.error or error
        if inner.error is not None:
            request.finish_reason = "error"
            report.notes.append(f"ended by an error: {why(inner.error)}")
            let_go(inner.error)
        elif reason == "abort":
            cut(inner.rows, inner.passes, lockstep=False)
            report.interrupted = True
            report.notes.append("aborted: the text ends with the last pass that was completed")
        self._totals.end(report, request.finish_reason)
        self._running.pop(id(inner), None)
        self._pool.free(inner)
        self._lacking = False
