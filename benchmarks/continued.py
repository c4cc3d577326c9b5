"""A draft model that is trained on from a checkpoint, by the weights of responses: tokens per pass on held-out ones.

    python tools/head_prompts.py --stories FILE --plays FILE --kinds story --count 2400 --out lines.jsonl
    python benchmarks/continued.py --data lines.jsonl --out RUNS [--json benchmarks/results/continued.json]

`nano-draft` goes on with responses of `nano`, in as many steps each: all of them equally often; in proportion to the
tokens per pass that chains of `nano-draft` have on them, as of `truedraft train --weights accepted`; and in inverse
proportion. All figures are counts, which do not depend on other load.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft import registry
from truedraft.cli.train import lines_of
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.train.batches import Line, Reader
from truedraft.train.drafter import LOG, held_out, train_drafter
from truedraft.train.loop import Plan
from truedraft.train.responses import Responding, given_responses
from truedraft.train.shapes import replayed

START, TARGET = "nano-draft", "nano"


def tokens_per_pass(lines: Sequence[Line], read: Reader, most: int) -> list[float]:
    """Of each line, with chains of the start."""
    model = load(START)[0].float()
    return [replayed(model, [read([line])], most)[most] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--drafted", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, tokenizer = load(TARGET)
    _, sources, answers = lines_of(args.data)
    fast = truedraft.accelerate(model, tokenizer, draft=None)
    lines = given_responses(fast, tokenizer, sources, answers, print, Responding())
    accepted = tokens_per_pass(lines, Reader(model, ()), args.drafted)
    ways: dict[str, list[float]] = {
        "equal": [], "accepted": accepted, "inverse of accepted": [1 / rate for rate in accepted]
    }  # fmt: skip
    results: dict[str, Any] = {}
    for way, weights in ways.items():
        torch.manual_seed(0)
        model, _ = load(TARGET)
        out = args.out / way.replace(" ", "-")
        learner = registry.method("drafters", "draft-model").learner(model=START, drafted=args.drafted)
        plan = Plan(minutes=1e6, steps=args.steps, every=1e6, lr=args.lr)
        ids = [prompt for prompt, _ in lines], [response for _, response in lines]
        train_drafter(
            learner, model, tokenizer, ids[0], out, plan, answers=ids[1], weights=weights, batch=args.batch,
            start=Path(START),
        )  # fmt: skip
        before, after = [json.loads(row) for row in (out / LOG).read_text().splitlines()]
        results.setdefault("before", {name: before[name] for name in ("tokens_per_pass", "overlap")})
        results[way] = {name: after[name] for name in ("tokens_per_pass", "overlap", "tokens")}
        print(way, results[way], flush=True)
    if args.json:
        settings = {option: value for option, value in vars(args).items() if isinstance(value, int | float)}
        payload = {"settings": settings, "lines": len(lines), "held out": len(held_out(lines)[0]), "weights": results}
        write_whole(args.json, json.dumps(payload, indent=1) + "\n")


if __name__ == "__main__":
    main()
