"""Learned drafters of the same training beside each other, by counts: what each has of the same responses and steps.

    python tools/head_prompts.py --stories FILE --plays FILE --count 2400 --out LINES.jsonl
    python benchmarks/trained_heads.py --lines LINES.jsonl --runs FOLDER --json FILE [--only NAME ...] [--note]

Each head is trained for `nano` on the same responses of it, in the same number of steps of as many tokens. What is in
the folder of runs is not trained again, and `--only` replaces the rows of some heads in the file. All figures are
tokens per pass of drafts in full, of about five and of 24 tokens, on the embedded stories, beginnings of Python
functions and edits, which do not depend on the load of the machine. Every text is compared with that of
`model.generate`. `--note` writes them for the pages of the methods. The layer for multi-token prediction, which other
models bring with them, is trained here beside a finished `nano`, which has none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from heads import workloads
from noted import figure, note
from shared_drafters import Measured
from truedraft import registry
from truedraft.drafters.heads._mtp import MtpHead
from truedraft.drafters.heads._unroll import UnrolledLearner, layer_like
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.train.drafter import train_drafter
from truedraft.train.loop import Plan

CHAIN, TREE = "nodes=5,depth=5,top_k=1", "nodes=24,depth=6,top_k=6"
FEW = "nodes=4,depth=4,top_k=1", "nodes=24,depth=4,top_k=6"  # of those that predict four tokens
WAYS = {  # by trained head: the methods that draft with it, and their knobs
    "eagle": (("eagle2", CHAIN), ("eagle2", TREE), ("eagle", "")),
    "eagle3": (("eagle3", CHAIN), ("eagle3", TREE)),
    "glide": (("glide", CHAIN), ("glide", TREE)),
    "hydra": tuple(("hydra", knobs) for knobs in FEW),
    "mlp-speculator": tuple(("mlp-speculator", knobs) for knobs in FEW),
    "medusa": (("medusa", "nodes=4,top_k=1"), ("medusa", "nodes=24")),
    "dflash": (("dflash", "depth=7,top_k=1"), ("dflash", "depth=7,top_k=4,nodes=24")),
    "mtp": (("mtp", "nodes=1,depth=1"), ("mtp", CHAIN), ("mtp", TREE)),
}
COMMAND = "python benchmarks/trained_heads.py --lines LINES.jsonl --runs FOLDER --json FILE"


@dataclass
class MtpTraining(UnrolledLearner):
    """Of a layer for multi-token prediction, in DeepSeek's layout, unrolled over its own states."""

    name: ClassVar[str] = "mtp"
    vocabulary = 0
    steps: int = 3
    decay: float = 0.8
    loss_name: str = "kl"

    def head(self, model: Any) -> MtpHead:
        record = dict(layers=(-1,), depths=1, raw_states=False, layer=layer_like(model.config), head_norms=False)
        return MtpHead(record, model)

    def initialise(self) -> None:
        """Begin with the feature of the token before."""
        head: Any = self.module
        with torch.no_grad():
            head.depths[0].eh_proj.weight.normal_(0, 0.02)
            head.depths[0].eh_proj.weight[:, -head.size :] += torch.eye(head.size)


def train(name: str, lines: list[dict[str, str]], run: Path, steps: int, batch: int, resume: bool = False) -> None:
    model, tokenizer = load("nano")
    torch.manual_seed(0)
    learner: Any = MtpTraining() if name == "mtp" else registry.method("drafters", name).learner()  # type: ignore[misc]
    train_drafter(
        learner, model.float(), tokenizer, [line["prompt"] for line in lines], run,
        Plan(minutes=1e9, steps=steps, every=20, lr=3e-3, bf16=True),
        answers=[line["response"] for line in lines], batch=batch, resume=resume,
    )  # fmt: skip


def shape_of(knobs: str) -> str:
    """What a draft looks like, in words."""
    given = dict(part.split("=") for part in knobs.split(",") if part)
    if given.get("nodes") == "1":
        return "a token"
    if given.get("top_k") == "1":
        return f"chain of {given['depth' if 'depth' in given else 'nodes']}"
    return f"tree of {given['nodes']}" if given else "its tree"


def drafter(method: str, knobs: str, model: Any, run: Path) -> Any:
    """A drafter with the head of a run."""
    source: Any = str(run)
    if method == "mtp":
        source = MtpTraining().head(model)
        source.load_state_dict(load_file(run / "drafter.safetensors"))
    return registry.load("drafters", f"{method}:{knobs}" if knobs else method, model=source)


def measured(name: str, by_kind: dict[str, Measured], run: Path) -> Iterator[dict[str, Any]]:
    log = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    for method, knobs in WAYS[name]:
        draft = drafter(method, knobs, next(iter(by_kind.values())).model, run)
        for kind, decoded in by_kind.items():
            for sampled in (False, True):
                found = decoded(draft, sampled)
                head: Any = draft.heads if method == "medusa" else draft.head
                weights = sum(p.numel() for p in head.parameters())
                yield {
                    "head": name, "method": method, "way": shape_of(knobs), "knobs": knobs, "kind": kind,
                    "sampled": sampled, "weights": weights, "steps": log["steps"], "trained_tokens": log["tokens"],
                    **found,
                }  # fmt: skip


def noted(found: dict[str, Any]) -> None:
    """Write the figures of each method for its page."""
    rows = sorted(found["results"], key=lambda row: row["method"])
    for method, of_method in groupby(rows, key=lambda row: row["method"]):
        figures = []
        for row in of_method:
            setting = (
                f"nano, {row['steps']:,} steps of training ({row['trained_tokens']:,} tokens), drafts in full, "
                f"{'sampled at 0.8' if row['sampled'] else 'greedy'}"
            )
            what = f"{row['kind']}, {row['way']}"
            figures.append(
                figure(what, round(row["mean_acceptance_length"], 2), "tokens per pass", setting, "counts", COMMAND)
            )
        note("drafters", method, sorted(figures, key=lambda one: one["setting"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--limit", type=int, default=8, help="prompts of a kind")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on with the runs from their last validations")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--note", action="store_true")
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.lines.read_text("utf-8").splitlines()]
    args.runs.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        if args.resume or not (args.runs / name / "drafter.safetensors").exists():
            train(name, lines, args.runs / name, args.steps, args.batch, args.resume)
    if args.train_only:
        return
    torch.set_grad_enabled(False)
    model, tokenizer = load("nano", "float32")
    by_kind = {}
    for load_ in workloads(0, args.limit):
        encoded = [tokenizer(item.text, return_tensors="pt").input_ids for item in load_.items]
        by_kind[load_.name] = Measured(model, tokenizer, encoded)
    found = json.loads(args.json.read_text()) if args.json.exists() else {"results": []}
    for name in args.only:
        rows = list(measured(name, by_kind, args.runs / name))
        kept = [row for row in found["results"] if row["head"] != name]
        found = {"target": "nano", "lines": len(lines), "results": [*kept, *rows]}
        write_whole(args.json, json.dumps(found, indent=1) + "\n")
        print(name, *(f"{row['kind']} {row['way']} {row['mean_acceptance_length']}" for row in rows), flush=True)
    if args.note:
        noted(found)


if __name__ == "__main__":
    main()
