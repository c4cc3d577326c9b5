"""Learned drafters beside passes that cost what real ones cost: the embedded heads of `nano`, stretched with it.

    python benchmarks/heads.py [--sizes 0.1B 0.5B] [--dtypes fp32 bf16] [--rounds 3] [--json FILE]

`nano` is stretched to 0.1 B and 0.5 B parameters (`truedraft.bench.stretched`): the same text, real acceptance, passes
of that size. The sides take turns in one process; figures are medians, and ratios are taken round by round. Beside
`transformers` alone there is its assisted generation, with `nano-draft` in its own size.

Theory: tokens times the measured seconds of a plain pass, over the measured seconds of the passes that were made, each
at its width, and of the head's own passes. Attained is the measured speed-up over no drafts, prompts left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import truedraft
from truedraft import assets
from truedraft.bench.compare import compare
from truedraft.bench.roofline import Gauge, measure_passes
from truedraft.bench.sides import Side, transformers_side, truedraft_side
from truedraft.bench.sizes import SIZES
from truedraft.bench.stretched import stretched
from truedraft.bench.workloads import Item, Workload, embedded
from truedraft.files import write_whole
from truedraft.loading import load

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DRAFTS = {
    "story": ("eagle3", "medusa", "auto"),
    "python": ("eagle3", "medusa", "auto"),
    "edit": ("eagle3", "input-guided", "input-guided+eagle3", "auto"),
}
TEMPERATURES = (0.0, 0.8)


def workloads(tokens: int, limit: int) -> list[Workload]:
    """Stories, beginnings of Python functions, and edits, all embedded."""
    found = {load.name: load.items for load in embedded()}
    parts = (assets.prompt("edit.py.txt") + "\n\n\n" + assets.prompt("shorten.py.txt")).split("\n\n\n")
    beginnings = tuple(Item("\n".join(part.split("\n")[:3]) + "\n") for part in parts if part.count("\n") > 3)
    kinds = {"story": found["story"], "python": beginnings, "edit": found["edit"]}
    return [Workload(kind, items[:limit], tokens) for kind, items in kinds.items()]


@contextmanager
def timed(of: Any, method: str) -> Iterator[list[float]]:
    """The seconds of each call of a method within the block."""
    taken: list[float] = []
    plain = getattr(of, method)

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(*args, **kwargs)
        finally:
            taken.append(time.perf_counter() - start)

    setattr(of, method, measured)
    try:
        yield taken
    finally:
        delattr(of, method)


def head_of(fast: Any) -> tuple[Any, tuple[str, ...]] | None:
    """What computes a head's passes, and its methods; None for drafters that are no head."""
    drafter = fast.drafter
    if hasattr(drafter, "reader"):
        return drafter.reader.passes, ("run", "fuse")
    return (drafter.heads, ("forward",)) if hasattr(drafter, "heads") else None


def explained(
    fast: Any, undrafted: Any, tokenizer: Any, load: Workload, temperature: float, rounds: int
) -> dict[str, float]:
    """Speed-up over no drafts, prompts left out, by theory and as attained; and what drafting costs over its passes."""
    settings: dict[str, Any] = dict(max_new_tokens=load.tokens, do_sample=temperature > 0)
    if temperature:
        settings["temperature"] = temperature
    theory, attained, drafting = [], [], []
    inputs = tokenizer(load.items[0].text, return_tensors="pt", return_token_type_ids=False)
    of, methods = head_of(fast) or (None, ())
    assert of is not None
    for turn in range(rounds + 1):
        spent = []
        for side in (undrafted, fast):
            torch.manual_seed(0)
            side.forget()
            with ExitStack() as timing:
                taken = [timing.enter_context(timed(of, method)) for method in methods]
                side.generate(**inputs, **settings)
            seconds = side.report().seconds
            spent.append(
                seconds["all"] - sum(seconds.get(part, 0.0) for part in ("prefill", "measure", "draft_prefill"))
            )
        report = fast.report()
        widths = [done.width for done in report.passes if done.width]
        cost = measure_passes([fast.target], inputs["input_ids"].shape[1] + load.tokens // 2, sorted({1, *widths}), 3)[
            0
        ]
        own = sum(map(sum, taken))
        if turn:
            plain = (report.tokens - 1) * cost[1]
            theory.append(plain / (sum(cost[width] for width in widths) + own))
            attained.append(spent[0] / spent[1])
            seconds = report.seconds
            drafting.append((seconds["draft"] - seconds.get("draft_prefill", 0.0)) / own if own else 0.0)
    return {"theory": median(theory), "attained": median(attained), "drafting_over_passes": median(drafting)}


def tree_cost(model: Any, tokenizer: Any, load: Workload, machine: Any) -> dict[str, float]:
    """Seconds of drafting trees of 24 nodes, of the head's passes for them, and of their arithmetic at measured rates.

    The arithmetic of a pass is the larger of its weights over the bandwidth and its products over the multiply rate:
    with the head's own weights, as drafts may be taken to cost, and with the copies in int8 that are read.
    """
    fast = truedraft.accelerate(model, tokenizer, draft="eagle3", control="fixed")
    inputs = tokenizer(load.items[0].text, return_tensors="pt", return_token_type_ids=False)
    fast.generate(**inputs, max_new_tokens=16, do_sample=False)
    head = fast.drafter.head
    narrow = [w for w in head.parameters() if w.ndim == 2]
    size, count = next(head.parameters()).element_size(), sum(w.numel() for w in narrow)
    run, nodes = fast.drafter.reader.passes.run, []
    fast.drafter.reader.passes.run = lambda given, *rest: nodes.append(len(given)) or run(given, *rest)
    fast.generate(**inputs, max_new_tokens=64, do_sample=False)
    del fast.drafter.reader.passes.run
    floor, int8 = (
        sum(max(count * wide / machine.bandwidth, 2 * count * n / machine.rate) for n in nodes) for wide in (size, 1)
    )
    with timed(fast.drafter.reader.passes, "run") as taken:
        fast.generate(**inputs, max_new_tokens=64, do_sample=False)
    report = fast.report()
    drafts, spent = len(report.passes) - 1, report.seconds["draft"] - report.seconds["draft_prefill"]
    return {
        "drafting": spent / drafts, "passes": sum(taken) / drafts, "arithmetic": floor / drafts,
        "over_arithmetic": spent / floor, "over_arithmetic_in_int8": spent / int8, "over_passes": spent / sum(taken),
    }  # fmt: skip


def prefill_cost(model: Any, tokenizer: Any, length: int) -> dict[str, float]:
    """Seconds until the first token of a prompt, with and without the head, and of the head's reading of it."""
    ids = torch.arange(length)[None] % len(tokenizer)
    found: dict[str, float] = {"length": length}
    for name, draft in (("no drafts", None), ("eagle3", "eagle3")):
        fast = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
        fast.generate(ids[:, :16], max_new_tokens=4, do_sample=False)
        first, second = [], []
        for _ in range(3):
            stamps: list[float] = []
            start = time.perf_counter()
            fast.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False,
                on_pass=lambda done: stamps.append(time.perf_counter()),
            )  # fmt: skip
            first.append(stamps[0] - start)
            second.append(fast.report().seconds["draft"])
        found |= {f"{name}: first token": median(first), f"{name}: drafting": median(second)}
    return found


def measured(size: str, dtype: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All figures of one stretched target."""
    small, tokenizer = load("nano", DTYPES[dtype])
    draft_model, _ = load("nano-draft", DTYPES[dtype])
    layers, hidden = SIZES["nano"][size]
    model = stretched(small, layers=layers, hidden=hidden)
    gauge = Gauge(dtype=model.dtype)
    gauge.sample()
    undrafted = truedraft.accelerate(model, tokenizer, draft=None)
    fasts = {spec: truedraft.accelerate(model, tokenizer, draft=spec) for some in DRAFTS.values() for spec in some}
    figures, explanations = [], []
    for temperature in TEMPERATURES:
        for load_ in workloads(args.tokens, args.limit):
            sides: list[Side] = [transformers_side("transformers", model)]
            if temperature == 0:
                sides.append(transformers_side("transformers assisted", model, assistant_model=draft_model))
            sides.append(truedraft_side("no drafts", undrafted))
            sides += [truedraft_side(spec, fasts[spec]) for spec in DRAFTS[load_.name]]
            rows = compare(sides, load_, tokenizer, model.device, 1, args.rounds, temperature, 0)
            figures += [{**vars(row)} for row in rows]
            _print(console, f"{size} {dtype}", rows)
            for spec in DRAFTS[load_.name]:
                if head_of(fasts[spec]) is not None:
                    found = explained(fasts[spec], undrafted, tokenizer, load_, temperature, args.rounds)
                    explanations.append({"workload": load_.name, "side": spec, "temperature": temperature, **found})
                    console.print(explanations[-1])
    story = workloads(64, 1)[0]
    return {
        "size": size, "dtype": dtype, "difference": model.stretch.difference, "figures": figures,
        "explained": explanations, "tree": tree_cost(model, tokenizer, story, gauge.machine()),
        "prefill": prefill_cost(model, tokenizer, 512),
    }  # fmt: skip


def _print(console: Console, name: str, rows: Sequence[Any]) -> None:
    table = Table(title=f"{name}: {rows[0].workload}, temperature {rows[0].temperature:g}")
    for head in ("side", "identical", "speed-up", "over no drafts", "tokens/pass", "tok/s", "first token ms", "draft"):
        table.add_column(head)
    for row in rows:
        table.add_row(
            row.side, "yes" if row.differs is None else "NO",
            "" if row.speed_up is None else f"{row.speed_up[0]:.2f}",
            "" if row.against_no_drafts is None else f"{row.against_no_drafts:.2f}",
            "" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}",
            f"{row.tokens_per_second:.1f}", f"{1e3 * (row.time_to_first_token or 0):.1f}",
            "" if row.draft_share is None else f"{row.draft_share:.0%}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES["nano"]))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    console = Console(width=140)
    found = []
    for size in args.sizes:
        for dtype in args.dtypes:
            found.append(measured(size, dtype, args, console))
            console.print({key: found[-1][key] for key in ("tree", "prefill")})
    if args.json:
        machine = {"processor": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        write_whole(args.json, json.dumps({"machine": machine, "targets": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
