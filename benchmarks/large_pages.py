"""Passes over weights in large pages of the processor, and in those of 4 KB.

    python benchmarks/large_pages.py --model NAME=MODEL[:DTYPE] ... [--threads 1 2] [--rounds 12] [--json FILE]

MODEL is what `truedraft.load` takes. Each model is loaded twice in one process, with its weights in pages of either
kind; passes of some tokens after 40 others are made in turns, and the least time of a width is reported. Rows of the
file of other models and numbers of threads are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.runtime import large_pages
from truedraft.tree import DraftTree

WIDTHS, TEXT = (1, 2, 4, 8), 40
LEASTS = {"4 KB": sys.maxsize, "2 MB": large_pages.LEAST}  # bytes from which a matrix is in large pages


def measured(name: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a pass by kind of pages and width, and seconds of loading and packing."""
    targets, seconds = {}, {}
    for kind, least in LEASTS.items():
        large_pages.LEAST = least
        began = time.perf_counter()
        model, tokenizer = truedraft.load(name, *filter(None, [dtype]))
        target = truedraft.accelerate(model, tokenizer, draft=None).target
        seconds[kind] = round(time.perf_counter() - began, 2)
        target.reserve(1, TEXT + 2 * WIDTHS[-1])
        target.prefill([target.prompt(torch.arange(1000, 1000 + TEXT))])
        target.commit([[0]])
        targets[kind] = target
    best = {kind: dict.fromkeys(WIDTHS, float("inf")) for kind in LEASTS}
    for _ in range(rounds):
        for width in WIDTHS:
            for kind, target in targets.items():
                began = time.perf_counter()
                target.score([DraftTree.chain(5, range(7, 6 + width))])
                best[kind][width] = min(best[kind][width], time.perf_counter() - began)
                target.rewind()
    passes = {kind: {width: round(1000 * s, 2) for width, s in of_kind.items()} for kind, of_kind in best.items()}
    return {"dtype": str(model.dtype).removeprefix("torch."), "milliseconds": passes, "loading": seconds}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", required=True, metavar="NAME=MODEL[:DTYPE]")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = json.loads(args.json.read_text())["results"] if args.json and args.json.exists() else []
    for given in args.model:
        name, _, rest = given.partition("=")
        model, _, dtype = rest.partition(":")
        for threads in args.threads:
            torch.set_num_threads(threads)
            row = {"model": name, "threads": threads} | measured(model, dtype, args.rounds)
            print(json.dumps(row), flush=True)
            kept = [one for one in results if (one["model"], one["threads"]) != (name, threads)]
            results = [*kept, row]
            if args.json:
                found = {"machine": machine(), "results": results}
                write_whole(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
