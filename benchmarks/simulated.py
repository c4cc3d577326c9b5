"""The cost control under a simulated clock: what its decisions are worth, without the noise of a machine.

    python benchmarks/simulated.py MODEL --prompts FILE [--unknown] [--drafter auto] [--requests 48] [--json FILE]

Every request is the first call of an accelerated model, greedy, by a control to which passes seem to take the seconds
of a curve, and steps besides those of `HOST`, by what is done in them. Texts, drafts and decisions are real; only the
clock is not. The figure of a request is the time that its tokens take without drafts over its time; requests are sorted
by it, and the means of their thirds are shown: the lowest third has the least to copy. Two curves: `small` is that of
SmolLM2-135M in Q4_1 on two cores, whose passes take 3.6 ms, and `large` one of passes that wait for weights. With
`--unknown` the control does not know the curve, as in the first process on a machine, and learns it from the passes of
its request.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import truedraft
from truedraft.control.cost import Cost
from truedraft.drafters._base import Drafter
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.runtime.curve import WIDTHS, Curve
from truedraft.stats import PassTimes
from truedraft.targets._base import Target
from truedraft.text.templates import request_text
from truedraft.tree import Accepted, DraftTree, Row

from audited import prompts_of  # isort: skip

CURVES = {  # seconds at WIDTHS
    "small": Curve(WIDTHS, (0.0036, 0.0042, 0.0056, 0.0088, 0.015, 0.026, 0.048)),
    "large": Curve(WIDTHS, (0.020, 0.0205, 0.021, 0.023, 0.026, 0.036, 0.060)),
}
HOST = {"none": 0.20e-3, "rest": 0.25e-3, "step": 0.34e-3, "look": 0.40e-3, "verify": 0.75e-3}  # as measured on SmolLM2
DRAFT = 0.20e-3  # of drafting, in steps that look for drafts or verify them


@dataclass
class Simulated(Cost):
    """The cost control, with a clock of its own; the engine's is ignored."""

    curve: Curve = CURVES["small"]
    known: bool = True
    steps: Counter[str] = field(default_factory=Counter)  # by what is done in them

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clock_times, self._clock_drafting = PassTimes(), dict[int, float]()

    @property
    def times(self) -> PassTimes:  # type: ignore[override]
        return self._clock_times

    @times.setter
    def times(self, value: PassTimes) -> None: ...

    @property
    def drafting(self) -> dict[int, float]:  # type: ignore[override]
        return self._clock_drafting

    @drafting.setter
    def drafting(self, value: dict[int, float]) -> None: ...

    def open(self, target: Target, drafter: Drafter, rows: int, lockstep: bool, steps: int) -> None:
        if self.known:
            self._costs.curve, self._costs.measured = self.curve, True
        self._costs.measure = lambda *given: None  # type: ignore[method-assign]
        super().open(target, drafter, rows, lockstep, steps)
        self._costs.target = target

    def budget(self, rows: Sequence[Row]) -> list[int]:
        sizes = super().budget(rows)
        self._kind = "look" if any(sizes) else "step" if self._batch else "rest"
        if self._kind == "look":
            (drafter,) = {id(row.request.drafter) for row in rows}
            self.drafting[drafter] = self.drafting.get(drafter, 0.0) + DRAFT
            self.times.draft += DRAFT
            self.times.all += DRAFT
        return sizes

    def prune(self, rows: Sequence[Row], trees: Sequence[DraftTree]) -> list[DraftTree]:
        kept = super().prune(rows, trees)
        width = sum(map(len, kept))
        if width > len(rows):
            self._kind = "verify"
        self.times.target += self.curve(width)
        self.times.all += self.curve(width) + HOST[self._kind]
        return kept

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        super().observe(rows, trees, accepted)
        self.steps[self._kind] += 1


def simulated(
    model: Any, tokenizer: Any, drafter: str, text: str, tokens: int, curve: Curve, known: bool
) -> tuple[float, Counter[str]]:
    """Of one request: the time of its tokens without drafts over its time, and its steps by kind."""
    control = Simulated(curve=curve, known=known)
    fast = truedraft.accelerate(model, tokenizer, draft=drafter, control=control)
    inputs = tokenizer(request_text(tokenizer, text), return_tensors="pt")
    emitted = fast.generate(**inputs, max_new_tokens=tokens, do_sample=False).shape[1] - inputs["input_ids"].shape[1]
    plain = (emitted - 1) * (curve(1) + HOST["none"])
    return plain / control.times.all if emitted > 1 else 1.0, control.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--unknown", action="store_true", help="the control does not know the curve")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    texts = prompts_of(args.prompts)
    texts = texts[:: max(len(texts) // args.requests, 1)][: args.requests]
    mean, results = statistics.geometric_mean, {}
    for name, curve in CURVES.items():
        found = [
            simulated(model, tokenizer, args.drafter, text, args.tokens, curve, not args.unknown) for text in texts
        ]
        ratios = sorted(ratio for ratio, _ in found)
        third = len(ratios) // 3
        thirds = ratios[:third], ratios[third : 2 * third], ratios[2 * third :]
        results[name] = {
            "requests": len(ratios), "least": round(ratios[0], 3), "mean": round(mean(ratios), 3),
            "thirds": [round(mean(part), 3) for part in thirds],
            "steps": dict(sum((steps for _, steps in found), Counter[str]())),
        }  # fmt: skip
        print(f"{name:6}", results[name], flush=True)
    if args.json:
        report = {"model": Path(args.model).name, "drafter": args.drafter, "tokens": args.tokens, "curves": results}
        write_whole(args.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
