"""Passes that a cascade of draft models saves: tokens per pass of the target, and passes of the draft models per token.

    python benchmarks/cascade.py [--tokens 150] [DRAFT ...]
    python benchmarks/cascade.py --target FOLDER --small FOLDER --sources FILE [--limit 64] [DRAFT ...]

Greedy, one row at a time, every draft in full. `nano-draft` drafts for `nano` on the embedded prompts; or a smaller
encoder-decoder (or the target itself) for an encoder-decoder on the lines of a file. The figures are counts, which do
not depend on other load.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import truedraft
from truedraft import Drafter, registry
from truedraft.bench.workloads import Item, Workload, embedded
from truedraft.drafters._compose import compose
from truedraft.drafters.models._reader import Reader
from truedraft.loading import load

DRAFTS = [
    "draft-model", "draft-model:length=5>max-gram", "cs-drafting:lenience=1.0", "cs-drafting:lenience=2.0",
    "cs-drafting", "cs-drafting-llama", "cs-drafting:bottom=suffix", "max-gram",
]  # fmt: skip


def drafter(spec: str, small: Any) -> Drafter:
    def one(part: str) -> Drafter:
        name = part.partition(":")[0].strip()
        name = registry.presets("drafters").get(name, (name, {}))[0]
        needs_model = "draft model" in registry.method("drafters", name).card.needs
        return registry.load("drafters", part, **({"model": small} if needs_model else {}))  # type: ignore[no-any-return]

    return compose(spec, one)


def counted(model: Any, tokenizer: Any, draft: Drafter, items: Sequence[Item], most: int) -> tuple[float, float]:
    """Tokens per pass of the target, passes of the draft models per token."""
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
    tokens = passes = draft_passes = 0
    score = Reader.score

    def counting(self: Reader, trees: Any) -> Any:
        nonlocal draft_passes
        draft_passes += 1
        return score(self, trees)

    Reader.score = counting  # type: ignore[method-assign]
    try:
        for item in items:
            ids = tokenizer(item.text, return_tensors="pt").input_ids
            given = {"references": [list(item.references)]} if item.references and draft.takes_references else {}
            fast.generate(ids, max_new_tokens=most, do_sample=False, **given)
            tokens, passes = tokens + fast.report().tokens, passes + len(fast.report().passes)
    finally:
        Reader.score = score  # type: ignore[method-assign]
    return tokens / passes, draft_passes / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", nargs="*", default=DRAFTS)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--small", type=Path)
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--limit", type=int, default=64)
    args = parser.parse_args()
    if args.target is None:
        (model, tokenizer), (small, _) = load("nano"), load("nano-draft")
        loads = embedded()
    else:
        model, small = (AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in (args.target, args.small))
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        lines = [line for line in args.sources.read_text().splitlines() if line.strip()][: args.limit]
        loads = [Workload(args.sources.name, tuple(map(Item, lines)))]
    torch.set_grad_enabled(False)
    print("tokens per pass of the target (passes of the draft models per token)")
    for spec in args.drafts:
        found = [
            (load.name, *counted(model, tokenizer, drafter(spec, small), load.items, min(load.tokens, args.tokens)))
            for load in loads
        ]
        print(
            f"{spec:34}",
            "  ".join(f"{name} {kept:5.2f} ({drafting:.2f})" for name, kept, drafting in found),
            flush=True,
        )


if __name__ == "__main__":
    main()
