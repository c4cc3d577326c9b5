"""What reflective verification accepts more of a draft, and what text it gives instead of the model's.

    python benchmarks/reflective.py MODEL [--shares 0 0.3 0.6] [--draft DRAFTER] [--json FILE] [--note NAME]

Counts on the embedded edits, chats and stories, which do not depend on the load of the machine: tokens per pass of
drafts in full, by the share of the second law; the share of tokens that are the model's likeliest ones behind the text
that was made; and how unlikely that text is to the model, in nats per token. Share 0 is exact: it is compared with
`model.generate`, token for token. `--note` writes the figures for the page of the rule, with the name of the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import truedraft
from noted import figure, note
from truedraft import registry
from truedraft.bench.workloads import embedded
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.text.templates import request_text

KINDS = ("edit", "chat", "story")


def encoded(tokenizer: Any, kind: str, limit: int) -> list[torch.Tensor]:
    """The token ids of the embedded prompts of a kind, (1, n) each, in the model's chat template where it has one."""
    found = []
    for item in next(one.items for one in embedded() if one.name == kind)[:limit]:
        text = item.text
        if tokenizer.chat_template:
            text = request_text(tokenizer, text)
        found.append(tokenizer(text, return_tensors="pt", return_token_type_ids=False)["input_ids"])
    return found


def measured(model: Any, tokenizer: Any, kind: str, share: float, args: argparse.Namespace) -> dict[str, Any]:
    rule = registry.load("accept.lossy", "reflective", share=share)
    fast = truedraft.accelerate(model, tokenizer, draft=args.draft, rule=rule, control="fixed")
    tokens = passes = likeliest = count = 0
    nats, exact = 0.0, True
    for ids in encoded(tokenizer, kind, args.limit):
        out = fast.generate(ids, max_new_tokens=args.tokens, do_sample=False)
        report = fast.report()
        tokens, passes = tokens + report.tokens, passes + report.row_passes
        logits, made = model(out).logits[0, ids.shape[1] - 1 : -1].float(), out[0, ids.shape[1] :]
        likeliest, count = likeliest + int((logits.argmax(-1) == made).sum()), count + len(made)
        nats += float(cross_entropy(logits, made, reduction="sum"))
        if share == 0:
            exact &= out.equal(model.generate(ids, max_new_tokens=args.tokens, do_sample=False))
    if not exact:
        raise ValueError("with share 0 the text differs from that of model.generate")
    return {
        "kind": kind, "share": share, "mean_acceptance_length": tokens / passes, "tokens": tokens, "passes": passes,
        "likeliest": likeliest / count, "nats": nats / count,
    }  # fmt: skip


def noted(rows: list[dict[str, Any]], name: str, args: argparse.Namespace) -> None:
    figures = []
    few = f"{args.limit} prompts of a kind" if args.limit > 1 else "a prompt of each kind"
    setting = f"{name}, drafts of {args.draft} in full, greedy, {few}, {args.tokens} tokens"
    command = f"python benchmarks/reflective.py {Path(args.model).name}"
    units = (
        ("mean_acceptance_length", 2, 1, "tokens per pass"),
        ("likeliest", 1, 100, "% of tokens that are the model's likeliest"), ("nats", 2, 1, "nats per token"),
    )  # fmt: skip
    for key, digits, times, unit in units:
        for row in rows:
            what = f"{row['kind']}, share {row['share']:g}"
            figures.append(figure(what, round(times * row[key], digits), unit, setting, "counts", command))
    note("accept.lossy", "reflective", figures)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="prompt-lookup")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.3, 0.6])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=2, help="prompts of a kind")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--note", metavar="NAME", help="of the model, in the pages of the methods")
    args = parser.parse_args()
    model, tokenizer = load(args.model, "float32")
    rows = []
    for kind in KINDS:
        for share in args.shares:
            rows.append(measured(model, tokenizer, kind, share, args))
            print(rows[-1], flush=True)
    if args.json:
        write_whole(args.json, json.dumps({"draft": args.draft, "results": rows}, indent=1) + "\n")
    if args.note:
        noted(rows, args.note, args)


if __name__ == "__main__":
    main()
