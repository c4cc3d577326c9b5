"""Embed a learned drafter of `nano`: its checkpoint in bf16, and its card.

    python tools/embed_head.py runs/eagle3 --to src/truedraft/assets/nano-eagle3

The run is one of `truedraft train` on the lines of `tools/head_prompts.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from truedraft import registry
from truedraft.drafters._learned import MADE_FOR, WEIGHTS, read_learnt, save_learnt, with_weights
from truedraft.files import write_whole
from truedraft.loading import load

CARD = """---
license: apache-2.0
language: en
---
# {name}

{article} `{method}` head of {weights:,} parameters (bf16) for `nano`, embedded in truedraft so that its demo, tests and
benchmarks run with no download: `truedraft demo --draft {method}`. It drafts for `nano` alone, and for `nano` stretched
(`truedraft bench nano --stretched 0.5B --draft {method}`). Beside passes as short as those of `nano` itself no head
pays; beside stretched ones `benchmarks/heads.py` has the figures.

    {record}

## Data

Responses of `nano` to {lines}: beginnings of stories, plays and Python functions, and edits, made by
`tools/head_prompts.py` from the texts below without the documents that `nano` holds out; half of the responses are
greedy, half sampled at 0.8. One line in a hundred is held out.

| text | licence |
|---|---|
| TinyStories (Eldan and Li 2023), a lower-cased sample of 4 MB | CDLA-Sharing-1.0 |
| the standard library of Python 3.11, tests and tables left out | PSF-2.0 |
| tiny Shakespeare | public domain |

## Validation over time

On held-out responses: tokens per pass with greedy chains of {drafted}, and acceptance by position, where the tokens
before it are accepted. On two cores that did other work as well.

| minutes | steps | tokens | tokens per pass | acceptance by position |
|---|---|---|---|---|
{rows}

## Train it again

    python tools/head_prompts.py --stories FILE --plays FILE --count {count} --out lines.jsonl
    {command}
    python tools/embed_head.py RUN --to src/truedraft/assets/{name}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--lines", type=int, required=True, help="lines that it was trained on")
    parser.add_argument("--count", type=int, default=18000, help="prompts that they were made of")
    parser.add_argument("--command", required=True, help="that trained it")
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    model, _ = load("nano")
    config, weights = read_learnt(args.run, args.method, model)
    config = {name: value for name, value in config.items() if name not in (MADE_FOR, "bfloat16")}
    kind: Any = registry.method("drafters", args.method)
    head = with_weights(lambda: kind.rebuilt(config, model), weights, args.method, args.run)
    save_learnt(args.to, args.method, head, model, head.record(), torch.bfloat16)
    rows = [json.loads(line) for line in (args.run / "log.jsonl").read_text().splitlines()]
    table = "\n".join(
        f"| {row['minutes']:.0f} | {row['steps']:,} | {row['tokens'] / 1e6:.1f} M | {row['tokens_per_pass']:.2f} | "
        f"{', '.join(f'{a:.2f}' for a in row['acceptance'])} |"
        for row in rows
    )
    card = CARD.format(
        name=args.to.name, article="An" if args.method[0] in "aeiou" else "A", method=args.method,
        weights=sum(w.numel() for w in head.parameters()), record=json.dumps(head.record()),
        lines=f"{args.lines:,} prompts", drafted=len(rows[-1]["acceptance"]), rows=table, count=args.count,
        command=args.command,
    )  # fmt: skip
    write_whole(args.to / "README.md", card)
    print(f"{(args.to / WEIGHTS).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
