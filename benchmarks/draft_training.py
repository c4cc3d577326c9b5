"""Draft models trained for `nano` with several losses: tokens per pass of the engine on held-out prompts.

    python tools/head_prompts.py --stories FILE --plays FILE --count 1400 --out lines.jsonl
    python benchmarks/draft_training.py --data lines.jsonl --out RUNS [--json benchmarks/results/draft_training.json]

Fresh draft models of one shape learn from the same lines, in the same order, for as many steps, from the same seed;
with `--then` the one by `ce` goes on for half as many steps by other losses, from a learning rate of `--second`. Some
lines are held out: from the ends of their prompts text is generated greedily and sampled at temperature 1, with chains
of `--length` drafted in full, and compared with `model.generate`. `overlap` is the mean over the held-out responses of
sum_x min(p(x), q(x)), the rate at which rejection sampling accepts. All figures but the seconds are counts, which do
not depend on other load.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft import registry
from truedraft.cli.train import lines_of
from truedraft.drafters._losses import LOSSES
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.train.batches import Reader, sorted_groups
from truedraft.train.drafter import held_out, train_drafter
from truedraft.train.loop import Plan
from truedraft.train.responses import Responding, given_responses

FIRST = "ce"  # the loss from whose model others go on


def learner(**knobs: Any) -> Any:
    return registry.method("drafters", "draft-model").learner(**knobs)


def train(args: argparse.Namespace, out: Path, loss: str, steps: int, lr: float, **knobs: Any) -> None:
    """Train a draft model for `nano`, unless the folder has it."""
    if (out / "model.safetensors").exists():
        return
    torch.manual_seed(args.seed)
    model, tokenizer = load("nano")
    _, sources, answers = lines_of(args.data)
    made = learner(loss_name=loss, **knobs)
    plan = Plan(minutes=1e6, steps=steps, every=1e6, lr=lr, seed=args.seed)
    train_drafter(made, model, tokenizer, sources, out, plan, answers=answers, batch=args.batch)


def measure(args: argparse.Namespace, out: Path, held: Sequence[Any]) -> dict[str, Any]:
    """Overlap, and tokens per pass of the engine by rule, with the number of rows that differ from the reference."""
    model, tokenizer = load("nano")
    judge = learner(model=str(out), loss_name="tvd", drafted=args.length)
    judge.tokenizer = tokenizer
    judge.begin(model)
    read = Reader(model, judge.needs.hidden)
    found = judge.evaluate(map(read, sorted_groups(held, args.batch, read.width)))
    draft = f"draft-model:{out},length={args.length}"
    for rule, settings in {
        "greedy": dict(do_sample=False),
        "seeded": dict(do_sample=True, temperature=1.0, top_k=0),
        "rejection": dict(do_sample=True, temperature=1.0, top_k=0),
    }.items():
        fast = truedraft.accelerate(model, tokenizer, draft=draft, rule=rule, control="fixed")
        tokens = passes = differing = 0
        for number, (prompt, _) in enumerate(held):
            ids = torch.tensor([prompt[-args.prompt :]])
            torch.manual_seed(number)
            text = fast.generate(ids, max_new_tokens=args.tokens, **settings)
            tokens += text.shape[1] - ids.shape[1] - 1
            passes += len(fast.report().passes) - 1  # one reads the prompt
            if rule != "rejection":  # whose text has the same distribution, and is another one
                torch.manual_seed(number)
                differing += not text.equal(model.generate(ids, max_new_tokens=args.tokens, **settings))
        found[rule] = round(tokens / passes, 3)
        if rule != "rejection":
            found[f"{rule}_rows_that_differ"] = differing
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=["ce", "kl", "tvd", "tvd++"])
    parser.add_argument("--then", nargs="*", choices=LOSSES, default=[], help=f"losses that go on from {FIRST}")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--second", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = dict(layers=args.layers, width=args.width)
    model, tokenizer = load("nano")
    fast = truedraft.accelerate(model, tokenizer, draft=None)
    _, sources, answers = lines_of(args.data)
    held, _ = held_out(given_responses(fast, tokenizer, sources, answers, print, Responding()))
    results: dict[str, Any] = {}
    if args.json and args.json.exists():  # of other losses
        results = json.loads(args.json.read_text())["losses"]
    for name in [*args.losses, *(f"{FIRST}, {loss}" for loss in args.then)]:
        began, out = time.process_time(), args.out / name.replace(", ", "-").replace("+", "p")  # + joins drafters
        if name in args.losses:
            train(args, out, name, args.steps, args.lr, **shape)
        else:
            train(args, args.out / FIRST, FIRST, args.steps, args.lr, **shape)
            train(args, out, name.partition(", ")[2], args.steps // 2, args.second, model=str(args.out / FIRST))
        seconds = time.process_time() - began
        results[name] = {
            **measure(args, out, held),
            **({"processor_seconds_of_training": round(seconds)} if seconds > 9 else {}),
        }
        print(name, results[name], flush=True)
        if args.json:
            settings = {option: value for option, value in vars(args).items() if isinstance(value, int | float)}
            payload = {"settings": settings, "held out": len(held), "losses": results}
            write_whole(args.json, json.dumps(payload, indent=1) + "\n")


if __name__ == "__main__":
    main()
