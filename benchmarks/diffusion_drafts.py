"""A diffusion model as the drafter of an autoregressive one: `nano-diffusion` for `nano`, beside heads and lookups.

    python benchmarks/diffusion_drafts.py [--sizes as-is 0.5B] [--rounds 3] [--json FILE] [--note]

First the mean acceptance length of drafts of equal size, all of them verified: chains of eight tokens, trees of 24.
Then the speed with sizes by the control of costs, beside no drafts, the default drafter and the embedded head. Beside
`nano` as it is the drafter is as large as the target, and beside `nano` stretched (`truedraft.bench.stretched`) it has
the cost that drafters have beside real models. The sides take turns in one process; speeds are medians of ratios.
`--note` writes the acceptance lengths for the pages of the methods.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import truedraft
from heads import workloads
from noted import figure, note
from truedraft.bench.compare import compare
from truedraft.bench.sides import truedraft_side
from truedraft.bench.sizes import size_of
from truedraft.bench.stretched import stretched
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

MODEL = "model=nano-diffusion"
EQUAL = {
    "chains of 8": (f"deer:{MODEL},depth=8", f"diffuspec:{MODEL},depth=8,shortest=8", "eagle3:depth=8,top_k=1,nodes=8"),
    "trees of 24": (f"deer-tree:{MODEL}", f"diffuspec-tree:{MODEL}", "eagle3:nodes=24"),
}
DRAFTS = ("auto", "eagle3", *(f"{name}:{MODEL}" for name in ("deer", "deer-tree", "diffuspec", "diffuspec-tree")))
AS_IS = "as-is"


def measured(model: Any, tokenizer: Any, groups: dict[str, tuple[str, ...]], control: str, args: Any) -> list[Any]:
    """Rows of `compare` by group and workload, with the group."""
    found = []
    for group, drafts in groups.items():
        sides = [("no drafts", truedraft.accelerate(model, tokenizer, draft=None))]
        sides += [(draft, truedraft.accelerate(model, tokenizer, draft=draft, control=control)) for draft in drafts]
        for load_ in workloads(args.tokens, args.limit):
            made = [truedraft_side(*side) for side in sides]
            rows = compare(made, load_, tokenizer, model.device, 1, args.rounds, args.temperature, 0)
            found += [{"group": group, **vars(row)} for row in rows]
    return found


def shown(console: Console, title: str, figures: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for head in ("group", "workload", "side", "same text", "tokens/pass", "over no drafts", "drafting"):
        table.add_column(head)
    for row in figures:
        length, ratio, share = (row[key] for key in ("mean_acceptance_length", "against_no_drafts", "draft_share"))
        table.add_row(
            row["group"], row["workload"], row["side"], "yes" if row["differs"] is None else "NO",
            *("" if value is None else f"{value:.2f}" for value in (length, ratio, share)),
        )  # fmt: skip
    console.print(table)


def noted(figures: list[dict[str, Any]], tokens: int, limit: int) -> None:
    """Write the acceptance lengths of each method for its page; those of its trees are on the same one."""
    setting = f"nano drafted by nano-diffusion, greedy, drafts in full, {limit} prompts of a kind, {tokens} tokens"
    made: dict[str, list[Any]] = {"deer": [], "diffuspec": []}
    for row in figures:
        name = row["side"].partition(":")[0].removesuffix("-tree")
        if name in made:
            what, length = f"{row['workload']}, {row['group']}", round(row["mean_acceptance_length"], 2)
            command = "python benchmarks/diffusion_drafts.py --sizes"
            made[name].append(figure(what, length, "tokens per pass", setting, "counts", command))
    for name, found in made.items():
        note("drafters", name, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=[AS_IS, "0.5B"], help="none for the counts alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", action="store_true")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    console, found = Console(width=140), {}
    small, tokenizer = load("nano", "float32")
    figures = measured(small, tokenizer, EQUAL, "fixed", argparse.Namespace(**{**vars(args), "rounds": 1}))
    shown(console, "nano: drafts of equal size", figures)
    found["equal"] = figures
    if args.note:
        noted(figures, args.tokens, args.limit)
    for size in args.sizes:
        model = small
        if size != AS_IS:
            layers, hidden = size_of(size, "nano")
            model = stretched(small, layers=layers, hidden=hidden)
        found[size] = measured(model, tokenizer, {"by costs": DRAFTS}, "cost", args)
        shown(console, f"nano, {size}: by costs", found[size])
    if args.json:
        write_whole(args.json, json.dumps({"machine": machine(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
