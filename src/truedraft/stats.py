"""Statistics of a call, pass by pass, and the report made from them. Pure data: filled outside the decode loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ParamSpec, TypeVar

from truedraft.layout import labelled

COARSE = ("bfloat16", "float16")  # dtypes in which two ways of computing often lead to different texts

P = ParamSpec("P")
R = TypeVar("R")


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


class Stopwatch:
    """Seconds spent in parts of the engine, which `timed` wraps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, f: Callable[P, R]) -> Callable[P, R]:
        """`f`, its time counted under `part`."""
        self.seconds.setdefault(part, 0.0)

        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            try:
                return f(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return wrapped


@dataclass
class Report:
    """The figures of a call of `generate`.

    drafter, rule, guarantee, control: names of the methods used, and the guarantee of the rule.
    runtime: how passes were computed, and why not faster.
    notes: one sentence for each condition that a caller should notice (rows in lockstep, a lossy rule).
    passes: every pass of the target, the prompt's own first.
    seconds: wall time by part: calibrate (measuring costs, a share of each call until they are complete), prefill,
        draft, observe (updates of drafters when rows begin and after passes), control, target, all.
    attributions: spans of the output that were copied from documents, from rules that report them.
    reference: the plain decoding that the guarantee names.
    dtype: of the model, as text.
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
    attributions: tuple[Attribution, ...] = ()
    reference: str = ""
    dtype: str = ""
    near_ties: float | None = None

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
        """Emitted tokens over the time of the call, calibration left out."""
        return self.tokens / self._working

    @property
    def engine_seconds_per_pass(self) -> float:
        """Time outside of the target's forward and prefill, per pass."""
        own = self._working - self.seconds.get("target", 0.0) - self.seconds.get("prefill", 0.0)
        return own / max(len(self.passes), 1)

    @property
    def _working(self) -> float:
        return max(self.seconds.get("all", 0.0) - self.seconds.get("calibrate", 0.0), 1e-9)

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
            "tokens": self.tokens,
            "passes": len(self.passes),
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": None if self.acceptance_rate is None else round(self.acceptance_rate, 4),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "attributions": [asdict(a) for a in self.attributions],
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
        if parts := [part for part in ("prefill", "draft", "target") if part in self.seconds]:
            yield "time", ", ".join(f"{part} {self.seconds[part] / self._working:.0%}" for part in parts)
        if self.attributions:
            copied, sources = sum(a.end - a.start for a in self.attributions), {a.source for a in self.attributions}
            yield "copied", f"{copied} tokens copied, {len(self.attributions)} spans of {', '.join(sorted(sources))}"
        for note in self.notes:
            yield "note", note
