"""Instruct models of real size: requests answered by transformers and by truedraft, in turns in one process.

    python benchmarks/real.py --model NAME=MODEL[:DTYPE] ... [--rounds 3] [--limit 2] [--json FILE]

MODEL is what `truedraft.load` takes; NAME stands in the tables, with what the file is. The side of transformers reads a
file of GGUF by itself, and makes floats of its integers. Questions, summaries, edits of texts and files of code are the
embedded requests, each in the model's chat template, greedy, up to 160 tokens. Tokens per second are of whole calls,
prompts included. Every text is compared with that of `model.generate`; in bf16 texts may differ at near-ties, which the
file counts. Models in the file that are not measured again keep their rows.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft import loading
from truedraft.bench.compare import compare
from truedraft.bench.sides import NO_DRAFTS, transformers_side, truedraft_side
from truedraft.bench.workloads import Workload, embedded
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.runtime import checkpoints

LOOKUP = 10  # tokens of transformers' own prompt lookup
KEPT = (
    "workload", "side", "differs", "tokens", "tokens_per_second", "time_per_output_token", "mean_acceptance_length",
    "texts", "agreement",
)  # fmt: skip


def measured(name: str, model: str, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model, by kind of request and side."""
    own, tokenizer = truedraft.load(model, dtype)
    plain = own
    source = loading.source_of(model, "--model")
    if isinstance(source, Path) and checkpoints.is_gguf(source):
        plain = of_transformers(source, own)
    fast = {
        side: truedraft.accelerate(own, tokenizer, draft=draft)
        for side, draft in ((NO_DRAFTS, None), ("default", "auto"))
    }
    sides = [
        transformers_side("transformers", plain),
        transformers_side(f"its prompt lookup of {LOOKUP}", plain, prompt_lookup_num_tokens=LOOKUP),
        *(truedraft_side(side, one) for side, one in fast.items()),
    ]
    rows = []
    for load in embedded(tokenizer=tokenizer):
        chosen = Workload(load.name, load.items[: args.limit], args.tokens)
        for found in compare(sides, chosen, tokenizer, own.device, rounds=args.rounds, progress=print):
            rows.append(
                {"model": name, "dtype": str(own.dtype).removeprefix("torch."), **{k: asdict(found)[k] for k in KEPT}}
            )
            print({k: v for k, v in rows[-1].items() if v is not None}, flush=True)
    return rows


def of_transformers(file: Path, like: Any) -> Any:
    """The model of a file of GGUF as transformers reads it, with the ends of text of another."""
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=like.dtype).eval()
    found.generation_config = like.generation_config
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=MODEL[:DTYPE]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=2, help="requests of a kind")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--machine", help="a description of this machine, for --json")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"results": []}
    for given in args.model:
        name, _, spec = given.rpartition("=")
        model, _, dtype = spec.partition(":")
        rows = measured(name, model, dtype or "auto", args)
        kept = [row for row in found["results"] if row["model"] != name]
        found = {"machine": args.machine or machine(), "tokens": args.tokens, "results": [*kept, *rows]}
        if args.json:
            write_whole(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
