"""Drafting while the target verifies: speed beside `draft-model`, by the cores that each side has, and drafts ready.

    python benchmarks/overlap.py [--pairs TARGET DRAFT ...] [--stretched LAYERS HIDDEN] [--tokens 120] [--rounds 5]
        [--length 7] [--cores 2] [--controls fixed cost] [--rule rejection] [--json FILE]

Every way decodes the same prompts greedily, in rounds, one after the other; with `--rule` it samples from the whole law
at temperature 1, verified by that rule. Speeds are medians of ratios of seconds per token to `draft-model` of the same
length, under the first of the controls, on all cores, on the same prompt in the same round. In "1+1" the target has all
cores but one, and the thread that drafts beside it the other; in "2+1" and "2+2" they share them. `ready` is the share
of drafts that were there when they were requested. `--stretched` makes the first pair's target larger, with the same
text (`bench/stretched.py`), and is 42 1024 for half a billion parameters. Ratios are only those of an idle machine;
tokens per pass and drafts ready depend on time too, because a pass that takes longer has longer drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import truedraft
from stories import beginnings
from truedraft import Drafter, registry
from truedraft.bench.stretched import stretched
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
PAIRS = [("nano", "nano-draft"), (str(WEIGHTS / "bitllama_3M"), str(WEIGHTS / "stories260K"))]


@dataclass
class Way:
    """A drafter, and torch's threads during its calls.

    counts: tokens, passes, drafts that were requested, and those ready.
    """

    fast: Any
    drafter: Drafter | None
    threads: int
    seconds: list[float] = field(default_factory=list)
    exact: bool = True
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)

    def run(self, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        torch.set_num_threads(self.threads)
        torch.manual_seed(len(self.seconds))
        before, start = self._drafts(), time.perf_counter()
        out: torch.Tensor = self.fast.generate(ids, **settings)
        seconds = time.perf_counter() - start
        report, after = self.fast.report(), self._drafts()
        self.seconds.append(seconds / report.tokens)
        more = report.tokens, len(report.passes), after[0] - before[0], after[1] - before[1]
        self.counts = tuple(a + b for a, b in zip(self.counts, more, strict=True))  # type: ignore[assignment]
        return out

    def _drafts(self) -> tuple[int, int]:
        return getattr(self.drafter, "requested", 0), getattr(self.drafter, "ready", 0)


def ways_of(
    model: Any, tokenizer: Any, draft: str, length: int, cores: int, controls: Sequence[str], rule: str | None
) -> dict[str, Way]:
    def way(spec: str, control: str, threads: int) -> Way:
        made = registry.load("drafters", spec) if spec else None
        return Way(truedraft.accelerate(model, tokenizer, draft=made, rule=rule, control=control), made, threads)

    split = sorted({(max(cores - 1, 1), 1), (cores, 1), (cores, cores)})
    alone = sorted({max(cores - 1, 1), cores})
    ways = {f"none, {threads}": way("", "fixed", threads) for threads in alone}
    for control in controls:
        for threads in alone:
            spec = f"draft-model:model={draft},length={length}"
            ways[f"draft-model, {threads}, {control}"] = way(spec, control, threads)
        for method in ("pearl", f"pearl:serial={length}", "mirror-sd"):
            name, _, knobs = method.partition(":")
            for mine, others in split:
                spec = f"{name}:model={draft},length={length},threads={others}" + (f",{knobs}" if knobs else "")
                ways[f"{method}, {mine}+{others}, {control}"] = way(spec, control, mine)
    return ways


def measured(
    model: Any,
    tokenizer: Any,
    names: tuple[str, str],
    tokens: int,
    rounds: int,
    length: int,
    cores: int,
    controls: Sequence[str],
    rule: str | None,
) -> list[dict[str, Any]]:
    """A row by way."""
    ways = ways_of(model, tokenizer, names[1], length, cores, controls, rule)
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    if rule is not None:
        settings |= {"do_sample": True, "top_k": 0}
    prompts = beginnings(tokenizer, 3)
    plain = [model.generate(ids, **settings) if rule is None else None for ids in prompts]
    for _ in range(rounds):
        for ids, expected in zip(prompts, plain, strict=True):
            for way in ways.values():
                out = way.run(ids, **settings)
                way.exact &= expected is None or torch.equal(out, expected)
    rows, base = [], ways[f"draft-model, {cores}, {controls[0]}"]
    for name, way in ways.items():
        emitted, passes, requested, ready = way.counts
        rows.append({
            "target": Path(names[0]).name, "draft": Path(names[1]).name, "way": name,
            "exact": way.exact if rule is None else None, "tokens_per_pass": emitted / passes,
            "ready": ready / requested if requested else None,
            "speed": statistics.median(a / b for a, b in zip(base.seconds, way.seconds, strict=True)),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=[name for pair in PAIRS for name in pair])
    parser.add_argument("--stretched", nargs=2, type=int, metavar=("LAYERS", "HIDDEN"))
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=7)
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--controls", nargs="+", default=["fixed", "cost"])
    parser.add_argument("--rule", help="of acceptance, sampled; greedy by default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    for place, names in enumerate(zip(args.pairs[::2], args.pairs[1::2], strict=True)):
        model, tokenizer = load(names[0])
        if args.stretched and place == 0:
            layers, hidden = args.stretched
            model = stretched(model, layers=layers, hidden=hidden)
            names = (f"{names[0]} {layers}x{hidden}", names[1])
        found = measured(
            model, tokenizer, names, args.tokens, args.rounds, args.length, args.cores, args.controls, args.rule
        )
        rows += found
        for row in found:
            ready = "" if row["ready"] is None else f"{row['ready']:5.0%} ready"
            print(
                f"{row['target']:14} {row['way']:34} {row['speed']:5.2f}x {row['tokens_per_pass']:5.2f} tokens/pass "
                f"{'NOT EXACT' if row['exact'] is False else 'exact' if row['exact'] else args.rule} {ready}",
                flush=True,
            )
    if args.json:
        about = {
            "machine": machine(), "tokens": args.tokens, "rounds": args.rounds, "length": args.length,
            "cores": args.cores, "torch": torch.__version__,
        }  # fmt: skip
        write_whole(args.json, json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
