"""Texts and times of real models in bf16, near-ties kept or decided as `model.generate` decides them, over its own.

    python benchmarks/ties_real.py MODEL ... [--tokens 100] [--limit 20] [--threads 1] [--out FILE]
    python benchmarks/ties_real.py MODEL ... --prompts FILE ... [--ask TEXT] --kind "Spec-Bench" --limit 1000 [...]

Greedy, the embedded requests or, one after the other, those of files, each in the model's chat template, up to
`--limit` of a kind. A line of a file is an object of JSON with `turns`, `prompt` or `content` (`.jsonl`), or a text
that `--ask` asks something about. `keep` is the default and
`recheck` is `accelerate(ties="recheck")`, both with drafts. Each request is answered by `model.generate` and by both,
in turns in one process; times are process time of whole calls, prompts included. `setup` is the process time of
`accelerate(ties="recheck")` itself, in which bits are compared, after `keep` was set up. Rows of the file of other
models, kinds and numbers of tokens are kept, and a row with fewer texts than `--limit` is gone on with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft.bench.workloads import Item, Workload, embedded
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.text.templates import request_text

from audited import prompts_of  # isort: skip

PRINTED = 20  # requests after which figures are shown


Row = dict[str, Any]


def about(row: Row) -> tuple[Any, ...]:
    return row["model"], row["kind"], row["tokens"]


def measured(
    name: str, loads: Sequence[Workload] | None, args: argparse.Namespace, before: dict[tuple[Any, ...], Row]
) -> Iterator[Row]:
    """The figures of one model, by kind of request, after every request that is not in the rows of before."""
    model, tokenizer = truedraft.load(name, "bfloat16")
    keep = truedraft.accelerate(model, tokenizer, release_weights=False)
    began = time.process_time()
    recheck = truedraft.accelerate(model, tokenizer, ties="recheck")
    setup = time.process_time() - began
    for load in embedded(tokenizer=tokenizer) if loads is None else loads:
        had = before.get((Path(name).name, load.name, args.tokens), {})
        seconds: dict[str, float] = defaultdict(float, had.get("seconds", {}))
        differ = dict(had.get("differ", {"keep": 0, "recheck": 0}))
        chosen = float(had.get("emitted", 0))
        near = had.get("near_ties", 0.0) * chosen
        first = had.get("texts", 0)
        for done, item in enumerate(load.items[first : args.limit], first + 1):
            text = item.text if loads is None else request_text(tokenizer, item.text)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
            texts = {}
            for side, way in (("model.generate", model), ("keep", keep), ("recheck", recheck)):
                began = time.process_time()
                out: Any = way.generate(ids, max_new_tokens=args.tokens, do_sample=False)  # type: ignore[operator]
                seconds[side] += time.process_time() - began
                texts[side] = out[0, ids.shape[1] :].tolist()
            for side in differ:
                differ[side] += texts[side] != texts["model.generate"]
            report = keep.report()
            near, chosen = near + (report.near_ties or 0.0) * report.tokens, chosen + report.tokens
            yield {
                "model": Path(name).name, "kind": load.name, "texts": done, "tokens": args.tokens,
                "emitted": round(chosen), "runtime": recheck.target.runtime,
                "near_ties": round(near / chosen, 4), "differ": dict(differ),
                "setup": round(setup, 2), "seconds": {side: round(s, 2) for side, s in seconds.items()},
                "times_as_fast": {s: round(seconds["model.generate"] / seconds[s], 2) for s in differ},
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--limit", type=int, default=20, help="requests of a kind")
    parser.add_argument("--prompts", type=Path, nargs="+", help="requests of these files, in the place of the embedded")
    parser.add_argument("--ask", default="", help="what comes before each of them")
    parser.add_argument("--kind", default="requests", help="how those of the files are called in the results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    texts = [Item(args.ask + text) for path in args.prompts or () for text in prompts_of(path)]
    loads = [Workload(args.kind, tuple(texts))] if args.prompts else None
    results = json.loads(args.out.read_text())["results"] if args.out and args.out.exists() else []
    for name in args.models:
        for row in measured(name, loads, args, {about(row): row for row in results}):
            if row["texts"] % PRINTED == 0:
                print(json.dumps(row), flush=True)
            if args.out:
                results = [other for other in results if about(other) != about(row)] + [row]
                write_whole(args.out, json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
