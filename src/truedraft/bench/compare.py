"""Comparison of ways of generating on the same prompts: equality first, then speed.

All ways take turns in one process, round by round, so that other load on the machine affects all of them. For a way
whose tokens differ from those of its reference (`equality.py`), the first divergence is printed and no speed-up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median, quantiles
from typing import Any

import torch
from torch import Tensor

from truedraft.bench.equality import Equality, equalities
from truedraft.bench.sides import Clock, Side
from truedraft.bench.workloads import Item, Workload
from truedraft.stats import Report


@dataclass
class Measured:
    """One run of one side over a workload."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token, per call
    gaps: list[float] = field(default_factory=list)  # seconds between a token and the one before, per token
    rest: float = 0.0  # seconds after the first tokens
    after: int = 0  # tokens after the first
    peak: int = 0
    reports: list[Report] = field(default_factory=list)

    def take(self, clock: Clock, seconds: float, tokens: int, rows: int, report: Report | None) -> None:
        self.seconds += seconds
        self.tokens += tokens
        self.peak = max(self.peak, clock.peak)
        if report is not None:
            self.reports.append(report)
        if clock.stamps:
            self.first.append(clock.stamps[0][0])
            self.rest += clock.stamps[-1][0] - clock.stamps[0][0]
            self.after += max(tokens - rows, 0)
            for (before, _), (at, count) in zip(clock.stamps, clock.stamps[1:], strict=False):
                # tokens of one pass arrive together: the first waited for the pass, the others not at all
                waited = max(1, min(rows, count))
                self.gaps += [at - before] * waited + [0.0] * (count - waited)


@dataclass(frozen=True)
class Figures:
    """Figures of a side on a workload. Seconds are medians over rounds; `speed_up` is (median, low, high) against plain
    transformers in the same round, where low and high enclose the median with 95 % confidence (order statistics).

    differs: where the output first differed from that of the reference (`equality.py`); None where it never did.
    texts, agreement, as_undrafted, apart: as of `Equality`.
    as_model: whether all texts are those of the model alone.
    cut: prompts that were truncated to their end, because they were too long.
    bound: the largest possible speed-up over the same engine without drafts: mean acceptance length x cost of a plain
        pass / cost of a pass.
    """

    workload: str
    side: str
    batch: int
    temperature: float
    differs: str | None
    tokens: int
    tokens_per_second: float
    time_to_first_token: float | None
    time_per_output_token: float | None
    inter_token_latency: tuple[float, float] | None  # median and 95th percentile, per token
    passes: int | None
    mean_acceptance_length: float | None
    acceptance_by_position: list[float] = field(default_factory=list)
    draft_share: float | None = None
    target_share: float | None = None
    seconds_per_pass: float | None = None
    peak_memory: int = 0
    speed_up: tuple[float, float, float] | None = None
    against_no_drafts: float | None = None
    bound: float | None = None
    runtime: str | None = None
    cut: int = 0
    texts: int = 0
    agreement: float = 1.0
    as_undrafted: bool | None = None
    as_model: bool = True
    apart: dict[str, int] = field(default_factory=dict)


def _inputs(tokenizer: Any, texts: Sequence[str], room: int | None) -> Any:
    """Texts as a batch, their last `room` tokens each."""
    side, tokenizer.truncation_side = tokenizer.truncation_side, "left"
    try:
        return tokenizer(
            texts, return_tensors="pt", padding=len(texts) > 1, return_token_type_ids=False,
            truncation=room is not None, max_length=room,
        )  # fmt: skip
    finally:
        tokenizer.truncation_side = side


def compare(
    sides: Sequence[Side],
    workload: Workload,
    tokenizer: Any,
    device: torch.device,
    batch: int = 1,
    rounds: int = 5,
    temperature: float = 0.0,
    seed: int = 0,
    room: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Figures]:
    """Run the sides, the first of them plain transformers, in turns over a workload.

    Args:
        room: tokens of a prompt at most; longer ones are truncated to their end.
        temperature: 0 for greedy decoding; otherwise sampled under `seed`, the same for every side.
        progress: called with a line of text before each run.
    """
    settings: dict[str, Any] = dict(max_new_tokens=workload.tokens, do_sample=temperature > 0, num_beams=1)
    if temperature > 0:
        settings["temperature"] = temperature
    calls, cut = [], 0
    for at in range(0, len(workload.items), batch):
        items = workload.items[at : at + batch]
        text = [item.text for item in items]
        cut += sum(room is not None and len(tokenizer(one)["input_ids"]) > room for one in text)
        calls.append((items, _inputs(tokenizer, text, room).to(device), at))
    texts: list[list[Tensor]] = []
    for side in sides:  # the first run warms up, and is compared
        progress(f"{workload.name}: {side.name}, compared")
        side.fresh()
        texts.append([_once(side, inputs, settings, items, seed)[0] for items, inputs, _ in calls])
    equal = equalities(sides, texts, calls, settings, progress)
    kept: list[list[Measured]] = [[Measured() for _ in range(rounds)] for _ in sides]
    for turn in range(rounds):
        for k in _rotated(len(sides), turn):
            progress(f"{workload.name}: {sides[k].name}, round {turn + 1} of {rounds}")
            sides[k].fresh()
            for items, inputs, _ in calls:
                out, report, clock, seconds = _once(sides[k], inputs, settings, items, seed)
                emitted = _emitted(out, tokenizer.pad_token_id)
                kept[k][turn].take(clock, seconds, emitted, len(items), report)
    return [replace(f, cut=cut) for f in _figures(sides, kept, equal, workload, batch, temperature)]


def _once(
    side: Side, inputs: dict[str, Any], settings: dict[str, Any], items: Sequence[Item], seed: int
) -> tuple[Tensor, Report | None, Clock, float]:
    torch.manual_seed(seed)
    clock = Clock()
    out, report = side.run(inputs, settings, items, clock)
    if out.device.type == "cuda":
        torch.cuda.synchronize(out.device)
    return out, report, clock, time.perf_counter() - clock.start


def _rotated(count: int, turn: int) -> Iterator[int]:
    """The order of a round: each begins with another side, so that none is always first."""
    return ((turn + k) % count for k in range(count))


def _emitted(new: Tensor, pad: int | None) -> int:
    """New tokens, without the padding after rows that ended; the end-of-text token counts."""
    if pad is None:
        return new.numel()
    total = 0
    for row in new.tolist():
        n = len(row)
        while n > 1 and row[n - 1] == pad and row[n - 2] == pad:
            n -= 1
        total += n
    return total


def _figures(
    sides: Sequence[Side],
    kept: Sequence[Sequence[Measured]],
    equal: Sequence[Equality],
    workload: Workload,
    batch: int,
    temperature: float,
) -> list[Figures]:
    found: list[Figures] = []
    undrafted = next((runs for side, runs in zip(sides, kept, strict=True) if side.undrafted), None)
    for k, (side, runs) in enumerate(zip(sides, kept, strict=True)):
        ratios = [plain.seconds / run.seconds for plain, run in zip(kept[0], runs, strict=True)]
        figures: dict[str, Any] = {}
        if reports := runs[-1].reports:
            figures = _of_reports([report for run in runs for report in run.reports], len(runs))
            if undrafted is not None:
                plain = _of_reports([r for run in undrafted for r in run.reports], 1)
                fewer = figures["mean_acceptance_length"] / plain["mean_acceptance_length"]
                figures["bound"] = fewer * plain["seconds_per_pass"] / figures["seconds_per_pass"]
                figures["against_no_drafts"] = median(
                    u.seconds / r.seconds for u, r in zip(undrafted, runs, strict=True)
                )
            figures["runtime"] = reports[-1].runtime
        gaps = sorted(gap for run in runs for gap in run.gaps)
        found.append(
            Figures(
                workload=workload.name,
                side=side.name,
                batch=batch,
                temperature=temperature,
                as_model=not equal[k].apart,
                **vars(equal[k]),
                tokens=runs[-1].tokens,
                tokens_per_second=median(run.tokens / run.seconds for run in runs),
                time_to_first_token=median(t for run in runs for t in run.first) if runs[0].first else None,
                time_per_output_token=median(r.rest / r.after for r in runs if r.after) if gaps else None,
                inter_token_latency=(median(gaps), quantiles(gaps, n=20)[-1]) if len(gaps) > 1 else None,
                passes=figures.pop("passes", None),
                mean_acceptance_length=figures.pop("mean_acceptance_length", None),
                peak_memory=max(run.peak for run in runs),
                speed_up=None if equal[k].differs else (median(ratios), *interval(ratios)),
                **figures,
            )
        )
    return found


def _length_of(reports: Sequence[Report]) -> float:
    return sum(r.tokens for r in reports) / max(sum(r.row_passes for r in reports), 1)


def _of_reports(reports: Sequence[Report], rounds: int) -> dict[str, Any]:
    emissions = [e for r in reports for p in r.passes for e in p.emitted]
    drafted = [e for e in emissions if e.offered]
    deepest = max((e.drafted for e in drafted), default=0)
    working = sum(r.seconds["all"] - r.seconds.get("measure", 0.0) for r in reports)
    scored = sum(bool(p.width) for r in reports for p in r.passes)  # without the prompt's own pass
    return {
        "passes": sum(len(r.passes) for r in reports) // rounds,
        "mean_acceptance_length": _length_of(reports),
        "acceptance_by_position": [mean(e.drafted >= d for e in drafted) for d in range(1, deepest + 1)],
        "draft_share": sum(r.seconds.get("draft", 0.0) for r in reports) / working,
        "target_share": sum(r.seconds.get("target", 0.0) + r.seconds.get("prefill", 0.0) for r in reports) / working,
        "seconds_per_pass": sum(r.seconds.get("target", 0.0) for r in reports) / max(scored, 1),
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Order statistics that enclose the median with at least 95 % confidence; the extremes where values are few."""
    ordered, n = sorted(values), len(values)
    outside = 0
    below = 0.0
    while outside < n // 2 and below + math.comb(n, outside) / 2**n <= 0.025:
        below += math.comb(n, outside) / 2**n
        outside += 1
    k = max(outside - 1, 0)
    return ordered[k], ordered[n - 1 - k]
