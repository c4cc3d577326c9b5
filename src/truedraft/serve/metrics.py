"""Prometheus metrics, under vLLM's names where it has one, so that existing dashboards read them, and our own."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from truedraft.serve.job import Job

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
DEPTHS = 16  # positions of accepted drafts that are counted apart; deeper ones count in the last
WINDOW = 5.0  # seconds over which rates are taken


@dataclass(frozen=True)
class Rates:
    """What happened over the last seconds, per second."""

    tokens: float
    passes: float


class Metrics:
    """Counts what rows do; `advanced`, `ended` and `passed` are called in the engine's thread.

    Args:
        model: the label `model_name` of every metric.
    """

    def __init__(self, model: str):
        self.registry = CollectorRegistry(auto_describe=False)
        self._labels = {"model_name": model, "engine": "0"}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens emitted.")
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified, one per row and pass.")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self.accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        names = [*self._labels, "position"]
        per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by position.",
            names,
            registry=self.registry,
        )
        self.accepted_at = [per_position.labels(**self._labels, position=str(i)) for i in range(DEPTHS)]
        self.cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in cached prefixes.")
        self.cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens whose KV was reused.")
        self.preemptions = self._counter("vllm:num_preemptions", "Rows that were preempted: none ever is.")
        names = [*self._labels, "finished_reason"]
        self._success = Counter("vllm:request_success", "Rows that ended, by reason.", names, registry=self.registry)
        self.running = self._gauge("vllm:num_requests_running", "Rows that run.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Rows that wait.")
        self.cache_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the rows in use, 0 to 1.")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Until the first token.", SECONDS)
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens: those of a pass share its seconds.", SHORT
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean over a row's tokens but the first.", SHORT
        )
        self.end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", LONG)
        self.queued = self._histogram("vllm:request_queue_time_seconds", "In the queue.", LONG)
        self.prefill = self._histogram("vllm:request_prefill_time_seconds", "From the slot to the first token.", LONG)
        self.decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the last.", LONG)
        self.prompt_lengths = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.generated = self._histogram("vllm:request_generation_tokens", "Tokens emitted by a row.", TOKENS)
        self.iteration = self._histogram("vllm:iteration_tokens_total", "Tokens emitted by a pass.", TOKENS)
        self.passes = self._counter("truedraft:passes", "Passes of the target.")
        self.pass_seconds = self._histogram(
            "truedraft:pass_seconds", "Seconds of a step: drafts, pass, acceptance.", SHORT
        )
        self.pass_rows = self._histogram("truedraft:pass_rows", "Rows of a pass.", TOKENS[:9])
        self.refused = Counter(
            "truedraft:requests_refused", "Requests answered with an error.", [*self._labels, "status"],
            registry=self.registry,
        )  # fmt: skip
        self._recent: deque[tuple[float, int]] = deque()

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)

    def advanced(self, job: Job, tokens: int, drafted: int, offered: int, seconds: float) -> None:
        """A row emitted tokens. seconds: since its last emission, 0 for the first."""
        self.generation_tokens.inc(tokens)
        if offered:
            self.drafts.inc()
            self.draft_tokens.inc(offered)
            self.accepted_tokens.inc(drafted)
            for depth in range(drafted):
                self.accepted_at[min(depth, DEPTHS - 1)].inc()
        if job.passes == 1:
            self.prompt_tokens.inc(len(job.ids))
            self.cache_queries.inc(len(job.ids))
            self.cache_hits.inc(job.cached_tokens)
            self.first_token.observe(job.first - job.created)
        else:
            for _ in range(tokens):
                self.inter_token.observe(seconds / tokens)

    def ended(self, job: Job) -> None:
        """A row ended."""
        reason = job.finish_reason or "abort"
        self._success.labels(**self._labels, finished_reason=reason).inc()
        if not job.tokens:
            return
        self.end_to_end.observe(job.last - job.created)
        self.queued.observe(job.admitted - job.created)
        self.prefill.observe(job.first - job.admitted)
        self.decode.observe(job.last - job.first)
        self.prompt_lengths.observe(len(job.ids))
        self.generated.observe(len(job.tokens))
        if len(job.tokens) > 1:
            self.per_token.observe((job.last - job.first) / (len(job.tokens) - 1))

    def passed(self, rows: int, tokens: int, seconds: float) -> None:
        """A pass was made. seconds: of the step."""
        self.passes.inc()
        self.pass_seconds.observe(seconds)
        self.pass_rows.observe(rows)
        self.iteration.observe(tokens)
        now = time.perf_counter()
        self._recent.append((now, tokens))
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    def error(self, status: int) -> None:
        """A request was answered with an error."""
        self.refused.labels(**self._labels, status=str(status)).inc()

    def rates(self) -> Rates:
        """Tokens and passes per second over the last seconds."""
        since = time.perf_counter() - WINDOW
        recent = [tokens for at, tokens in list(self._recent) if at >= since]
        return Rates(sum(recent) / WINDOW, len(recent) / WINDOW)

    def page(self, waiting: int, running: int, max_rows: int) -> tuple[bytes, str]:
        """The text of `/metrics`, and its content type."""
        self.waiting.set(waiting)
        self.running.set(running)
        self.cache_usage.set(running / max_rows)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
