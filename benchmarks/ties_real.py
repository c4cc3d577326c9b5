"""Texts and times of real models in bf16, near-ties kept or decided as `model.generate` decides them, over its own.

    python benchmarks/ties_real.py MODEL ... [--tokens 100] [--limit 20] [--threads 1] [--out FILE]

Greedy, the embedded requests, each in the model's chat template, up to `--limit` of a kind. `keep` is the default and
`recheck` is `accelerate(ties="recheck")`, both with drafts. Each request is answered by `model.generate` and by both,
in turns in one process; times are process time of whole calls, prompts included. `setup` is the process time of
`accelerate(ties="recheck")` itself, in which bits are compared, after `keep` was set up. Models in the file that are
not measured again keep their rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft.bench.workloads import embedded
from truedraft.cli._models import machine
from truedraft.files import write_whole


def measured(name: str, tokens: int, limit: int) -> list[dict[str, Any]]:
    """The figures of one model, by kind of request."""
    model, tokenizer = truedraft.load(name, "bfloat16")
    keep = truedraft.accelerate(model, tokenizer)
    began = time.process_time()
    recheck = truedraft.accelerate(model, tokenizer, ties="recheck")
    setup = time.process_time() - began
    found = []
    for load in embedded(tokenizer=tokenizer):
        seconds: dict[str, float] = defaultdict(float)
        differ = {"keep": 0, "recheck": 0}
        near = chosen = 0.0
        for item in load.items[:limit]:
            ids = tokenizer(item.text, return_tensors="pt", add_special_tokens=False).input_ids
            texts = {}
            for side, way in (("model.generate", model), ("keep", keep), ("recheck", recheck)):
                began = time.process_time()
                out: Any = way.generate(ids, max_new_tokens=tokens, do_sample=False)  # type: ignore[operator]
                seconds[side] += time.process_time() - began
                texts[side] = out[0, ids.shape[1] :].tolist()
            for side in differ:
                differ[side] += texts[side] != texts["model.generate"]
            report = keep.report()
            near, chosen = near + (report.near_ties or 0.0) * report.tokens, chosen + report.tokens
        found.append(
            {
                "model": Path(name).name, "kind": load.name, "texts": min(limit, len(load.items)), "tokens": tokens,
                "runtime": recheck.target.runtime, "near_ties": round(near / chosen, 4), "differ": differ,
                "setup": round(setup, 2), "seconds": {side: round(s, 2) for side, s in seconds.items()},
                "times_as_fast": {s: round(seconds["model.generate"] / seconds[s], 2) for s in differ},
            }
        )  # fmt: skip
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--limit", type=int, default=20, help="requests of a kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    results = json.loads(args.out.read_text())["results"] if args.out and args.out.exists() else []
    for name in args.models:
        results = [row for row in results if row["model"] != Path(name).name] + measured(name, args.tokens, args.limit)
        if args.out:
            write_whole(args.out, json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
