"""GliDe's drafts by compiled passes, against those by passes in torch: seconds of a draft, and of decoding.

    python benchmarks/head_passes.py [--sizes as-is 0.5B] [--dtypes fp32 bf16] [--rounds 5] [--json FILE] [--note]

An untrained head drafts chains of five tokens for `nano`, as it is and stretched (`truedraft.bench.stretched`): the
seconds of a draft do not depend on what is drafted. The sides take turns in one process, and ratios are taken round by
round, so that they hold beside other work too, where seconds do not. `--note` writes them for the page of the method.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

import truedraft
from heads import DTYPES
from noted import figure, note
from truedraft import assets, registry
from truedraft.bench.sizes import size_of
from truedraft.bench.stretched import stretched
from truedraft.drafters.heads._crossing import CrossingPass
from truedraft.drafters.heads.glide import Training
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.runtime.panels import Int8Copies

PROMPT, TOKENS, AS_IS = 128, 24, "as-is"


def side(model: Any, tokenizer: Any, compiled: bool) -> Any:
    torch.manual_seed(0)
    learner = Training()
    learner.begin(model)
    head: Any = learner.module.eval().placed(model.device, model.dtype)
    head.runner = None if compiled else CrossingPass(head, Int8Copies())
    return truedraft.accelerate(
        model, tokenizer, draft=registry.load("drafters", "glide", model=head), control="fixed"
    )  # fmt: skip


def measured(size: str, dtype: str, rounds: int) -> dict[str, Any]:
    model, tokenizer = load("nano", DTYPES[dtype])
    if size != AS_IS:
        layers, hidden = size_of(size, "nano")
        model = stretched(model, layers=layers, hidden=hidden)
    sides = {name: side(model, tokenizer, name == "compiled") for name in ("torch", "compiled")}
    ids = tokenizer(assets.prompt("stories.txt"), return_tensors="pt", return_token_type_ids=False).input_ids
    drafts: dict[str, list[float]] = {name: [] for name in sides}
    decoding: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, fast in sides.items():
            fast.generate(ids[:, :PROMPT], max_new_tokens=TOKENS, do_sample=False)
            seconds, passes = fast.report().seconds, len(fast.report().passes) - 1
            drafts[name] += [(seconds["draft"] - seconds.get("draft_prefill", 0.0)) / passes][: turn > 0]
            decoding[name] += [(seconds["all"] - seconds["prefill"]) / passes][: turn > 0]
    ratios = {
        what: round(median(a / b for a, b in zip(of["torch"], of["compiled"], strict=True)), 2)
        for what, of in (("draft", drafts), ("step", decoding))
    }
    return {
        "size": size, "dtype": dtype, "ratios": ratios,
        "milliseconds": {name: round(1e3 * median(of), 2) for name, of in drafts.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=[AS_IS, "0.5B"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="two cores (AVX-512)", help="a description of this machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", action="store_true")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    rows = []
    for size in args.sizes:
        for dtype in args.dtypes:
            rows.append(measured(size, dtype, args.rounds))
            print(rows[-1], flush=True)
    if args.json:
        write_whole(args.json, json.dumps({"machine": args.machine, "results": rows}, indent=1) + "\n")
    if args.note:
        given = "times the speed by passes in torch", "nano, an untrained head, chains of 5", args.machine
        command = "python benchmarks/head_passes.py"
        note("drafters", "glide", [
            figure(f"{'as it is' if row['size'] == AS_IS else row['size'].replace('B', ' B')}, {row['dtype']}, {what}",
                   row["ratios"][key], *given, command)
            for key, what in (("draft", "a draft"), ("step", "a step of decoding")) for row in rows
        ])  # fmt: skip


if __name__ == "__main__":
    main()
