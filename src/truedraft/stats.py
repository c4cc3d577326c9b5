"""Statistics of a call, pass by pass, and the report made from them. Pure data: filled outside the decode loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from truedraft.layout import labelled

NOTABLE = 0.01  # share of a call's time from which it is displayed
COARSE = ("bfloat16", "float16")  # dtypes in which two ways of computing often lead to different texts
PARTS = ("prefill", "draft", "target", "verify", "commit", "observe", "control", "measure")  # of steps, see `PassTimes`


@dataclass(frozen=True, slots=True)
class Emission:
    """What one pass emitted for one row.

    row: place in the caller's batch.
    tokens: emitted token ids, in order.
    drafted: how many of them, from the first on, are accepted drafts; the rest is chosen by the target.
    offered: drafted nodes that were verified.
    """

    row: int
    tokens: tuple[int, ...]
    drafted: int
    offered: int


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the target; `width` is its nodes per row, padding included, or 0 for the prompt's own pass."""

    width: int
    emitted: tuple[Emission, ...]


@dataclass(frozen=True, slots=True)
class Attribution:
    """A span of the output that was copied from a document.

    row: place in the caller's batch.
    start, end: of the span among the row's new tokens, the end not included.
    source: name of the document; `references[i]` for the i-th of the row's references.
    offset: tokens of the document before the span.
    """

    row: int
    start: int
    end: int
    source: str
    offset: int


@dataclass
class PassTimes:
    """Wall seconds by part, added up from pass to pass; the difference of two readings is what lies between them.

    measure: measuring what passes cost, a share of each call until that is known.
    control: budgets, cuts, and what the control learns.
    prefill: passes over prompts.
    draft: proposals of drafters.
    draft_prefill: of these, the first proposals for rows, in which draft models and learned heads read the prompt.
    observe: what drafters do when rows begin and after passes.
    target: passes over drafts, until the device has made them.
    verify: what rules, logits processors and stopping criteria do besides.
    commit: keeping the keys and values of accepted paths.
    all: whole steps.
    """

    measure: float = 0.0
    prefill: float = 0.0
    target: float = 0.0
    draft: float = 0.0
    draft_prefill: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    observe: float = 0.0
    control: float = 0.0
    all: float = 0.0

    @property
    def outside(self) -> float:
        """Seconds of whole steps outside of passes, drafting and measuring."""
        return self.all - self.measure - self.prefill - self.target - self.draft


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """The shares of a call's time by part, which add up to 1; empty where no part was timed.

    Besides `PARTS`: loop, the rest of steps (rows that enter and leave, figures); outside, the rest of the call (its
    preparation by `model.generate`, streamers, the output).

    seconds: as in `Report`.
    """
    found = {part: seconds[part] for part in PARTS if seconds.get(part)}
    timed, steps, call = sum(found.values()), whole({**seconds, "call": 0.0}), whole(seconds)
    found |= {"loop": steps - timed, "outside": call - steps}
    return {part: spent / call for part, spent in found.items()} if timed else {}


def whole(seconds: Mapping[str, float]) -> float:
    """The time of a call, as far as it was timed."""
    steps = max(seconds.get("all", 0.0), sum([seconds.get(part, 0.0) for part in PARTS]))
    return max(seconds.get("call", 0.0), steps)


def percentages(parts: Mapping[str, float]) -> dict[str, int]:
    """Shares that add up to 1 as whole percentages that add up to 100: of those rounded down most, the largest rests
    are rounded up."""
    found = {part: int(100 * share) for part, share in parts.items()}
    by_rest = sorted(parts, key=lambda part: found[part] - 100 * parts[part])
    for part in by_rest[: 100 - sum(found.values())]:
        found[part] += 1
    return found


@dataclass
class Report:
    """The figures of a call of `generate`.

    drafter, rule, guarantee, control: names of the methods used, and the guarantee of the rule.
    runtime: how passes were computed, and why not faster.
    notes: one sentence for each condition that a caller should notice (rows in lockstep, a lossy rule).
    passes: every pass of the target, the prompt's own first.
    seconds: wall time by part, see `PassTimes`: measure (a share of each call until the costs are measured), prefill,
        draft, draft_prefill (a part of draft), target, verify, commit, observe, control, and all; and call, the whole
        call, what surrounds its steps included.
    cached_tokens: tokens of the prompt that were not computed, because a running engine had kept their keys and values.
    attributions: spans of the output that were copied from documents, from rules that report them.
    reference: the plain decoding that the guarantee names.
    dtype: of the model, as text.
    drafted_by: for each row, the drafts that each specialist made for it, where rows are routed to specialists.
    near_ties: the share of emitted tokens with a runner-up so close that rounding in this dtype could have chosen it;
        None where it was not measured (rules that do not choose the largest of their scores).
    """

    drafter: str
    rule: str
    guarantee: str
    control: str
    runtime: str
    notes: list[str] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    cached_tokens: int = 0
    attributions: tuple[Attribution, ...] = ()
    reference: str = ""
    dtype: str = ""
    near_ties: float | None = None
    drafted_by: Sequence[Mapping[str, int]] = ()

    @property
    def tokens(self) -> int:
        """Tokens emitted, all rows together."""
        return sum(len(e.tokens) for p in self.passes for e in p.emitted)

    @property
    def row_passes(self) -> int:
        return sum(len(p.emitted) for p in self.passes)

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per row and pass, bonus included; plain decoding has 1."""
        return self.tokens / max(self.row_passes, 1)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted nodes that were emitted; None where nothing was drafted."""
        offered = sum(e.offered for p in self.passes for e in p.emitted)
        return sum(e.drafted for p in self.passes for e in p.emitted) / offered if offered else None

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of the call, measuring left out."""
        return self.tokens / self._working

    @property
    def engine_seconds_per_pass(self) -> float:
        """Time outside of the target's forward and prefill, per pass."""
        own = self._working - self.seconds.get("target", 0.0) - self.seconds.get("prefill", 0.0)
        return own / max(len(self.passes), 1)

    @property
    def _working(self) -> float:
        return max(self.seconds.get("all", 0.0) - self.seconds.get("measure", 0.0), 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Figures alone, for JSON."""
        return {
            "drafter": self.drafter,
            "rule": self.rule,
            "guarantee": self.guarantee,
            "reference": self.reference,
            "near_ties": None if self.near_ties is None else round(self.near_ties, 6),
            "control": self.control,
            "runtime": self.runtime,
            "notes": self.notes,
            "interrupted": self.interrupted,
            "cached_tokens": self.cached_tokens,
            "tokens": self.tokens,
            "passes": len(self.passes),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": None if self.acceptance_rate is None else round(self.acceptance_rate, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "attributions": [asdict(a) for a in self.attributions],
            "drafted_by": [dict(drafts) for drafts in self.drafted_by],
            "seconds": {k: round(v, 6) for k, v in self.seconds.items()},
        }

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The display in IPython and notebooks: as text, not pass by pass."""
        printer.text(str(self))

    def __str__(self) -> str:
        return labelled(self.described())

    def described(self) -> Iterator[tuple[str, str]]:
        """The figures as text, each with a label."""
        yield "drafter", self.drafter
        yield "rule", f"{self.rule} (guarantee: {self.guarantee})"
        if self.near_ties or self.dtype in COARSE:
            yield "reference", self.reference
            if self.near_ties is not None:
                yield "near-ties", f"{self.near_ties:.1%} of the tokens"
        yield "control", self.control
        yield "passes by", self.runtime
        yield "tokens", f"{self.tokens} in {len(self.passes)} passes"
        yield "accepted", f"mean acceptance length {self.mean_acceptance_length:.2f}"
        rate = self.acceptance_rate
        yield "", "nothing drafted" if rate is None else f"{rate:.0%} of drafted nodes accepted"
        yield "speed", f"{self.tokens_per_second:.1f} tokens/s"
        if self.cached_tokens:
            yield "reused", f"{self.cached_tokens} tokens of the prompt"
        if parts := shares(self.seconds):
            yield "time", ", ".join(f"{part} {share}%" for part, share in percentages(parts).items() if share)
            first = self.seconds.get("draft_prefill", 0.0) / whole(self.seconds)
            if first >= NOTABLE:
                yield "", f"the first drafts, for which the prompt is read: {first:.0%}"
        if self.attributions:
            copied, sources = sum(a.end - a.start for a in self.attributions), {a.source for a in self.attributions}
            yield "copied", f"{copied} tokens copied, {len(self.attributions)} spans of {', '.join(sorted(sources))}"
        yield from zip(["drafts by", *[""] * len(self.drafted_by)], self._specialists(), strict=False)
        for note in self.notes:
            yield "note", note

    def _specialists(self) -> Iterator[str]:
        """For each specialist, the rows that it drafted for and its drafts."""
        for name in dict.fromkeys(name for drafts in self.drafted_by for name in drafts):
            rows = [i for i, drafts in enumerate(self.drafted_by) if name in drafts]
            count = sum(self.drafted_by[i][name] for i in rows)
            yield f"{name}: {count} for {'row' if len(rows) == 1 else 'rows'} {', '.join(map(str, rows))}"


@dataclass
class Totals:
    """What the requests of an engine came to, those that run left out.

    ended: how many ended for each reason.
    passes: of the target, prompts' own passes included. row_passes: the same counted once for each row in them.
    tokens: emitted. offered: nodes that were up for verification. drafted: those of them that were emitted.
    cached_tokens: tokens of prompts that were not computed, because their keys and values were kept.
    """

    ended: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    row_passes: int = 0
    tokens: int = 0
    offered: int = 0
    drafted: int = 0
    cached_tokens: int = 0

    def add(self, report: Report) -> None:
        emissions = [e for done in report.passes for e in done.emitted]
        self.row_passes += len(emissions)
        self.tokens += sum(len(e.tokens) for e in emissions)
        self.offered += sum(e.offered for e in emissions)
        self.drafted += sum(e.drafted for e in emissions)
        self.cached_tokens += report.cached_tokens

    def end(self, report: Report, reason: str) -> None:
        self.add(report)
        self.ended[reason] = self.ended.get(reason, 0) + 1


@dataclass(frozen=True)
class EngineReport:
    """A running engine, in figures.

    runtime: how passes are made. control: how much is drafted.
    totals: of all requests so far.
    waiting, running: requests now; those whose prompts are being read run too. reading: how many these are.
    prefix_bytes: bytes of keys and values kept for prompts with the same prefix.
    kv_bytes: those granted to running requests. kv_limit: the most of both together.
    preemptions: how often a request gave its memory back to be read again later.
    seconds: wall time by part, as in `Report`; "all" is the time within steps, but for admission and streamers.
    """

    runtime: str
    control: str
    totals: Totals
    waiting: int
    running: int
    seconds: dict[str, float]
    reading: int = 0
    prefix_bytes: int = 0
    kv_bytes: int = 0
    kv_limit: int = 0
    preemptions: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per row and pass, bonus included."""
        return self.totals.tokens / max(self.totals.row_passes, 1)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted nodes that were emitted; None where nothing was drafted."""
        return self.totals.drafted / self.totals.offered if self.totals.offered else None

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows over the time within steps, measuring left out."""
        return self.totals.tokens / max(self.seconds.get("all", 0.0) - self.seconds.get("measure", 0.0), 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Figures alone, for JSON."""
        return {
            "runtime": self.runtime,
            "control": self.control,
            "waiting": self.waiting,
            "running": self.running,
            "reading": self.reading,
            "prefix_bytes": self.prefix_bytes,
            "kv_bytes": self.kv_bytes,
            "kv_limit": self.kv_limit,
            "preemptions": self.preemptions,
            **asdict(self.totals),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": None if self.acceptance_rate is None else round(self.acceptance_rate, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "seconds": {part: round(seconds, 6) for part, seconds in self.seconds.items()},
        }

    def __str__(self) -> str:
        return labelled(self.described())

    def described(self) -> Iterator[tuple[str, str]]:
        """The figures in words, each with a label."""
        ended = [f"{count} ended by {reason!r}" for reason, count in self.totals.ended.items()]
        yield "requests", ", ".join([f"{self.waiting} waiting", f"{self.running} running", *ended])
        yield "control", self.control
        yield "passes by", self.runtime
        yield "tokens", f"{self.totals.tokens} in {self.totals.passes} passes"
        yield "accepted", f"mean acceptance length {self.mean_acceptance_length:.2f}"
        rate = self.acceptance_rate
        yield "", "nothing drafted" if rate is None else f"{rate:.0%} of drafted nodes accepted"
        yield "speed", f"{self.tokens_per_second:.1f} tokens/s"
        if self.totals.cached_tokens or self.prefix_bytes:
            yield "prefixes", f"{self.totals.cached_tokens} tokens reused, {self.prefix_bytes:,} bytes kept"
        if self.kv_limit:
            yield "KV cache", f"{self.kv_bytes:,} bytes of {self.kv_limit:,} in use, {self.preemptions} preemptions"
