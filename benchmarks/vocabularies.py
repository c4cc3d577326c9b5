"""Draft models with another tokenizer: exactness, acceptance and speed of each way, for pairs of real checkpoints.

    python benchmarks/vocabularies.py [--pairs TARGET DRAFT ...] --json FILE

Each way decodes the same prompts greedily, in rounds. `transformers` is its assisted generation with
`assistant_tokenizer`, which matches text too. Speeds are medians of ratios to truedraft without drafts, on the same
prompt in the same round, with drafts in full and under cost control.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft import assets
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
LLAMA, SMALL, LETTERS = (str(WEIGHTS / name) for name in ("bitllama_3M", "stories260K", "babyllama_tok105"))
PAIRS = [
    (LLAMA, LETTERS),
    (LLAMA, "nano-draft"),
    ("nano", LLAMA),
    ("nano", SMALL),
    (SMALL, "nano-draft"),
    (LETTERS, SMALL),
]
WAYS = ("draft-model", "string-level-exact")


def measured(target: str, draft: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row by way of drafting."""
    (model, tokenizer), (small, other) = load(target), load(draft)
    fast: dict[str, Any] = {"none": truedraft.accelerate(model, tokenizer, draft=None)}
    for way in WAYS:
        for control in ("fixed", "cost"):
            fast[f"{way}, {control}"] = truedraft.accelerate(
                model, tokenizer, draft=f"{way}:model={draft}", control=control
            )
    sides: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        name: lambda ids, side=side: side.generate(ids, max_new_tokens=tokens, do_sample=False)  # type: ignore[misc]
        for name, side in fast.items()
    }
    sides["transformers"] = lambda ids: model.generate(
        ids,
        max_new_tokens=tokens,
        do_sample=False,
        assistant_model=small,
        tokenizer=tokenizer,
        assistant_tokenizer=other,
    )
    texts = [assets.prompt("story.txt"), *assets.prompt("stories.txt").split("\n\n")][:3]
    prompts = [tokenizer(text.lower(), return_tensors="pt").input_ids[:, :64] for text in texts]
    plain = [model.generate(ids, max_new_tokens=tokens, do_sample=False) for ids in prompts]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    exact, passes, accepted = dict.fromkeys(sides, True), dict.fromkeys(fast, 0), {name: [0, 0] for name in fast}
    for _ in range(rounds):
        for ids, expected in zip(prompts, plain, strict=True):
            for name, side in sides.items():
                start = time.perf_counter()
                exact[name] &= torch.equal(side(ids), expected)
                seconds[name].append(time.perf_counter() - start)
                if name in fast:
                    emitted = [one for found in fast[name].report().passes for one in found.emitted]
                    passes[name] += len(fast[name].report().passes)
                    kept, offered = accepted[name]
                    accepted[name] = [kept + sum(e.drafted for e in emitted), offered + sum(e.offered for e in emitted)]
    count = rounds * sum(one.shape[1] - ids.shape[1] for one, ids in zip(plain, prompts, strict=True))
    return [
        {
            "target": Path(target).name, "draft": Path(draft).name, "way": name, "exact": exact[name],
            "tokens_per_pass": count / passes[name] if name in fast else None,
            "accepted": accepted[name][0] / max(accepted[name][1], 1) if name in fast else None,
            "speed": statistics.median(a / b for a, b in zip(seconds["none"], seconds[name], strict=True)),
        }
        for name in sides
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", metavar="MODEL", help="a target and its draft model, and so on")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = list(zip(args.pairs[::2], args.pairs[1::2], strict=True)) if args.pairs else PAIRS
    found: dict[str, Any] = {"machine": machine(), "rows": []}
    for target, draft in pairs:
        found["rows"] += measured(target, draft, args.tokens, args.rounds)
        for row in found["rows"][-len(WAYS) * 2 - 2 :]:
            print(row, flush=True)
        if args.json:
            write_whole(args.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
