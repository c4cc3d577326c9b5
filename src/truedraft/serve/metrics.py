"""Prometheus metrics, under vLLM's names where it has one, so that existing dashboards read them, and our own.

Counting happens in the engine's thread at every pass, so figures are plain numbers; they become metrics when scraped.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from truedraft.serve.job import Job

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
DEPTHS = 16  # positions of accepted drafts that are counted apart; deeper ones count in the last
WINDOW = 5.0  # seconds over which rates are taken

COUNTERS = {
    "vllm:prompt_tokens": "Tokens of prompts.",
    "vllm:generation_tokens": "Tokens emitted.",
    "vllm:spec_decode_num_drafts": "Drafts that were verified, one per row and pass.",
    "vllm:spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "vllm:spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in cached prefixes.",
    "vllm:prefix_cache_hits": "Prompt tokens whose keys and values were reused.",
    "vllm:num_preemptions": "Rows that gave their memory back, to be read again.",
    "truedraft:passes": "Passes of the target.",
    "truedraft:row_passes": "Passes of the target, counted once for each row that emitted tokens.",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two tokens: those of one pass share its seconds.", SHORT),
    "vllm:request_time_per_output_token_seconds": ("Mean over a row's tokens but the first.", SHORT),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token.", LONG),
    "vllm:request_queue_time_seconds": ("In the queue.", LONG),
    "vllm:request_prefill_time_seconds": ("From the slot to the first token.", LONG),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", LONG),
    "vllm:request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens emitted by a row.", TOKENS),
    "vllm:iteration_tokens_total": ("Tokens emitted by a pass.", TOKENS),
    "truedraft:pass_seconds": ("Seconds of a step: drafts, pass, acceptance.", SHORT),
    "truedraft:pass_rows": ("Rows of a pass.", TOKENS[:9]),
}


@dataclass
class Distribution:
    """Counts of values by bucket; a bucket holds those up to its bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """The counts of values up to each bound, and of all."""
        total, found = 0, []
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(frozen=True)
class Rates:
    """What happened over the last seconds, per second."""

    tokens: float
    passes: float


class Metrics:
    """Counts what rows do; `advanced`, `ended` and `passed` are called in the engine's thread.

    Args:
        model: the label `model_name` of every metric.

    Attributes:
        counters, distributions: by name. accepted_at: accepted drafts by position. ended_by: rows by reason.
        refused: requests by status of the error.
    """

    def __init__(self, model: str):
        self._labels = {"model_name": model, "engine": "0"}
        self.counters: Counter[str] = Counter()
        self.distributions = {name: Distribution(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.accepted_at = [0] * DEPTHS
        self.ended_by: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._gauges: dict[str, tuple[str, float]] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def advanced(self, job: Job, tokens: int, drafted: int, offered: int, seconds: float) -> None:
        """A pass over a row emitted tokens; of a canvas it may be none. seconds: since its last emission, 0 for the
        first."""
        counters = self.counters
        counters["vllm:generation_tokens"] += tokens
        counters["truedraft:row_passes"] += 1
        if offered:
            counters["vllm:spec_decode_num_drafts"] += 1
            counters["vllm:spec_decode_num_draft_tokens"] += offered
            counters["vllm:spec_decode_num_accepted_tokens"] += drafted
            for depth in range(drafted):
                self.accepted_at[min(depth, DEPTHS - 1)] += 1
        if not tokens and job.max_tokens:
            return
        if len(job.tokens) > tokens:
            self._observe("vllm:inter_token_latency_seconds", seconds / tokens, tokens)
            return
        counters["vllm:prompt_tokens"] += len(job.ids)
        counters["vllm:prefix_cache_queries"] += len(job.ids)
        counters["vllm:prefix_cache_hits"] += job.cached_tokens
        self._observe("vllm:time_to_first_token_seconds", job.first - job.created)

    def ended(self, job: Job) -> None:
        """A row ended."""
        self.ended_by[job.finish_reason or "abort"] += 1
        if not job.tokens:
            return
        self._observe("vllm:e2e_request_latency_seconds", job.last - job.created)
        self._observe("vllm:request_queue_time_seconds", job.admitted - job.created)
        self._observe("vllm:request_prefill_time_seconds", job.first - job.admitted)
        self._observe("vllm:request_decode_time_seconds", job.last - job.first)
        self._observe("vllm:request_prompt_tokens", len(job.ids))
        self._observe("vllm:request_generation_tokens", len(job.tokens))
        if len(job.tokens) > 1:
            each = (job.last - job.first) / (len(job.tokens) - 1)
            self._observe("vllm:request_time_per_output_token_seconds", each)

    def passed(self, rows: int, tokens: int, seconds: float) -> None:
        """A pass was made. seconds: of the step."""
        self.counters["truedraft:passes"] += 1
        self._observe("truedraft:pass_seconds", seconds)
        self._observe("truedraft:pass_rows", rows)
        self._observe("vllm:iteration_tokens_total", tokens)
        now = time.perf_counter()
        self._recent.append((now, tokens))
        while self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    def error(self, status: int) -> None:
        """A request was answered with an error."""
        self.refused[str(status)] += 1

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self.distributions[name].observe(value, times)

    def rates(self) -> Rates:
        """Tokens and passes per second over the last seconds."""
        since = time.perf_counter() - WINDOW
        recent = [tokens for at, tokens in list(self._recent) if at >= since]
        return Rates(sum(recent) / WINDOW, len(recent) / WINDOW)

    def page(self, waiting: int, running: int, kv_cache_usage: float, preemptions: int) -> tuple[bytes, str]:
        """The text of `/metrics`, and its content type."""
        self.counters["vllm:num_preemptions"] = preemptions
        self._gauges = {
            "vllm:num_requests_running": ("Rows that run.", running),
            "vllm:num_requests_waiting": ("Rows that wait.", waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of the memory for keys and values that rows hold, 0 to 1.",
                kv_cache_usage,
            ),
        }
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """The metrics, for `prometheus_client`."""
        names, values = list(self._labels), list(self._labels.values())
        for name, (text, value) in self._gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, self.counters[name])
            yield counter
        for name, (text, _) in HISTOGRAMS.items():
            found = self.distributions[name]
            histogram = HistogramMetricFamily(name, text, labels=names)
            histogram.add_metric(values, found.cumulative(), found.total)
            yield histogram
        by_position = {str(i): count for i, count in enumerate(self.accepted_at)}
        for name, text, label, counts in (
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position.", "position", by_position),
            ("vllm:request_success", "Rows that ended, by reason.", "finished_reason", self.ended_by),
            ("truedraft:requests_refused", "Requests answered with an error.", "status", self.refused),
        ):
            yield self._by_label(name, text, label, counts)

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for value, count in list(counts.items()):
            family.add_metric([*self._labels.values(), value], count)
        return family
