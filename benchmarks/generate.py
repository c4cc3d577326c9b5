"""The embedded model against plain `transformers` generate: story, edit, and the engine's own time.

    python benchmarks/generate.py [--rounds 7] [--model nano] [--json FILE]

Plain and accelerated runs alternate in one process; figures are medians, ratios are taken round by round. Output is
compared before any figure is printed. `hopeless` drafts random tokens: the loss under the cost control.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import truedraft
from truedraft import Card, Drafter, DraftTree
from truedraft.cli._models import load
from truedraft.cli.demo import cases
from truedraft.tree import Row


@dataclass
class Hopeless(Drafter):
    """Drafts of random tokens, as wide as those of prompt lookup."""

    card = Card(paper="none", idea="Draft nonsense.", family="test")
    vocabulary: int = 4096  # tokens drawn from

    @property
    def width(self) -> int:
        return 10

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return [
            DraftTree.chain(row.tokens[-1], [random.randrange(self.vocabulary) for _ in range(min(10, most))])
            for row, most in zip(rows, budget, strict=True)
        ]


def seconds(f: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = f()
    return time.perf_counter() - start, result


def compare(
    model: Any, tokenizer: Any, prompt: str, tokens: int, draft: Any, control: str, rounds: int
) -> dict[str, Any]:
    """One workload, `rounds` alternating runs after a warm-up: transformers, the engine without drafts, with drafts."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    settings = dict(max_new_tokens=tokens, do_sample=False)
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control=control)
    undrafted = truedraft.accelerate(model, tokenizer, draft=None)
    sides = [model.generate, undrafted.generate, fast.generate]
    expected, _, got = (side(**inputs, **settings) for side in sides)
    plain, alone, quick, engine, nodes = [], [], [], [], []
    for _ in range(rounds):
        fast.forget()  # every round has the same prompt
        for side, times in zip(sides, (plain, alone, quick), strict=True):
            times.append(seconds(lambda: side(**inputs, **settings))[0])
        report = fast.report()
        engine.append(report.engine_seconds_per_pass)
        nodes.append(sum(p.width for p in report.passes) / len(report.passes))
    emitted = got.shape[1] - inputs["input_ids"].shape[1]
    return {
        "identical": torch.equal(got, expected),
        "tokens": emitted,
        "passes": len(report.passes),
        "mean_acceptance_length": report.mean_acceptance_length,
        "plain_tokens_per_second": emitted / statistics.median(plain),
        "tokens_per_second": emitted / statistics.median(quick),
        "speed_up": statistics.median(p / q for p, q in zip(plain, quick, strict=True)),
        "against_no_drafts": statistics.median(a / q for a, q in zip(alone, quick, strict=True)),
        "engine_ms_per_pass": 1e3 * statistics.median(engine),
        "engine_budget_ms": 0.5 + 0.01 * statistics.median(nodes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load(args.model, "float32")
    random.seed(0)
    story, edit = cases(None, None, None)
    sides = [
        ("plain", None, "cost"),
        ("hopeless", Hopeless(len(tokenizer)), "cost"),
        ("auto", "auto", "cost"),
        ("prompt-lookup-long", "prompt-lookup-long", "cost"),
        ("prompt-lookup", "prompt-lookup", "cost"),
        ("prompt-lookup", "prompt-lookup", "fixed"),
        ("llma", "llma", "cost"),
    ]
    table = Table(
        title=f"{args.model}, batch 1, greedy, {torch.get_num_threads()} threads, {args.rounds} rounds, medians"
    )
    heads = ["prompt", "draft", "control", "identical", "tokens", "passes", "accepted", "plain tok/s", "tok/s"]
    for head in [*heads, "speed-up", "vs no drafts", "engine ms/pass (allowed)"]:
        table.add_column(head)
    rows = []
    for case, (name, draft, control) in itertools.product((story, edit), sides):
        row = compare(model, tokenizer, case.text, case.tokens, draft, control, args.rounds)
        rows.append({"prompt": case.name, "draft": name, "control": control, **row})
        table.add_row(
            case.name, name, control, "yes" if row["identical"] else "NO", str(row["tokens"]), str(row["passes"]),
            f"{row['mean_acceptance_length']:.2f}", f"{row['plain_tokens_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}", f"{row['speed_up']:.2f}x" if row["identical"] else "-",
            f"{row['against_no_drafts']:.2f}x", f"{row['engine_ms_per_pass']:.2f} ({row['engine_budget_ms']:.2f})",
        )  # fmt: skip
    Console(width=150).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
