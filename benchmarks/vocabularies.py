"""Draft models with another tokenizer: exactness, acceptance and cost of each way, for pairs of real checkpoints.

    python benchmarks/vocabularies.py [--pairs TARGET DRAFT ...] --json FILE
    python benchmarks/vocabularies.py --speeds [--pairs TARGET DRAFT ...] [--rounds N] --json FILE

Each way decodes the same prompts. Counted are passes of the target, and passes and tokens of the draft model behind its
prompt, so that the load of a machine does not matter; for `transformers`, its assisted generation with
`assistant_tokenizer` (greedy), those over the prompt too. Exact are tokens that equal those of `model.generate`,
sampled ones under the same seed; a rule for distributions has other tokens.

With `--speeds` greedy calls are timed instead, in full and under cost control, of `bitllama_3M` by `babyllama_tok105`
unless other pairs are given. In each round every side makes the same calls in turn; the first round, which measures
costs, is not counted. `speed` is the median of ratios to truedraft without drafts, on the same prompt in the same
round, and `speed_of_minima` that of the fastest calls, which other work on the machine affects least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft import assets
from truedraft.cli._models import machine
from truedraft.drafters.models._vocabularies import Vocabularies
from truedraft.files import write_whole
from truedraft.loading import load

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
LLAMA, SMALL, LETTERS = (str(WEIGHTS / name) for name in ("bitllama_3M", "stories260K", "babyllama_tok105"))
PAIRS = [(LLAMA, LETTERS), (LETTERS, SMALL), ("nano", SMALL), ("nano", LLAMA)]
WAYS = ("draft-model", "string-level-exact", "string-level-rejection")
DECODED: dict[str, dict[str, Any]] = {  # name -> rule
    "greedy": {"rule": "greedy"},
    "sampled, seeded": {"rule": "seeded"},
    "sampled, rejection": {"rule": "rejection"},
}


class Counted:
    """Passes of a draft model, and the tokens that they read."""

    def __init__(self) -> None:
        self.passes = self.nodes = 0

    def add(self, passes: int, nodes: int) -> None:
        self.passes += passes
        self.nodes += nodes

    def watch_reader(self, target: Any) -> None:
        """Count the passes that read drafts by a draft model of truedraft."""
        extend, greedily = target.extend_tapped, target.extend_greedily

        def extended(trees: Sequence[Any], written: Sequence[int], last: Sequence[int], taps: Any) -> Any:
            self.add(1, sum(map(len, trees)) - sum(written))
            return extend(trees, written, last, taps)

        def extended_greedily(trees: Sequence[Any], written: Sequence[int], chains: Sequence[Any]) -> Any:
            if (drafted := greedily(trees, written, chains)) is not None:
                later = [max(len(tokens) - 1, 0) for tokens in drafted]
                self.add(1 + max(later), sum(map(len, trees)) - sum(written) + sum(later))
            return drafted

        target.extend_tapped, target.extend_greedily = extended, extended_greedily

    def watch_model(self, model: Any) -> Any:
        """Count the passes of a model of transformers, those over prompts too; returns the handle of its hook."""
        return model.register_forward_pre_hook(
            lambda _, args, kwargs: self.add(1, (args[0] if args else kwargs["input_ids"]).shape[1]), with_kwargs=True
        )


def counted(target: str, draft: str, tokens: int) -> list[dict[str, Any]]:
    """A row by way of drafting and of decoding."""
    (model, tokenizer), (small, other) = load(target), load(draft)
    prompts = prompts_of(tokenizer)
    shared, rows = len(Vocabularies(tokenizer, other).shared), list[dict[str, Any]]()

    def add(
        way: str, decoded: str, generate: Callable[..., torch.Tensor], passes: Callable[[], int], own: Counted
    ) -> None:
        sample, exact, emitted, verified = decoded != "greedy", True, 0, 0
        for ids in prompts:
            settings = dict(max_new_tokens=tokens, do_sample=sample)
            torch.manual_seed(1)
            expected = model.generate(ids, **settings)
            before = passes()
            torch.manual_seed(1)
            found = generate(ids, **settings)
            verified += passes() - before
            exact &= torch.equal(found, expected)
            emitted += found.shape[1] - ids.shape[1]
        by_law = decoded == "sampled, rejection"
        rows.append({
            "target": Path(target).name, "draft": Path(draft).name, "shared": shared,
            "of": len(tokenizer), "way": way, "decoded": decoded, "exact": None if by_law else exact,
            "tokens_per_pass": round(emitted / verified, 3), "draft_passes": round(own.passes / emitted, 3),
            "draft_tokens": round(own.nodes / emitted, 3),
        })  # fmt: skip

    for way in WAYS:
        for decoded, rule in DECODED.items():
            if way == "string-level-exact" and decoded == "sampled, rejection":
                continue
            fast = truedraft.accelerate(model, tokenizer, draft=f"{way}:model={draft}", control="fixed", **rule)
            own, seen = Counted(), Counted()
            own.watch_reader(fast.drafter.reader.target)  # type: ignore[attr-defined]

            def generate(ids: torch.Tensor, fast: Any = fast, seen: Counted = seen, **settings: Any) -> torch.Tensor:
                found = fast.generate(ids, **settings)
                seen.add(len(fast.report().passes), 0)
                return found  # type: ignore[no-any-return]

            add(way, decoded, generate, lambda seen=seen: seen.passes, own)  # type: ignore[misc]
    own, seen = Counted(), Counted()

    def assisted(ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        handles = [own.watch_model(small), seen.watch_model(model)]
        try:
            return model.generate(  # type: ignore[no-any-return]
                ids, assistant_model=small, tokenizer=tokenizer, assistant_tokenizer=other, **settings
            )
        finally:
            for handle in handles:
                handle.remove()

    add("transformers", "greedy", assisted, lambda: seen.passes, own)
    return rows


def timed(target: str, draft: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row by way of drafting and control."""
    model, tokenizer = load(target)
    sides = {("none", "cost"): truedraft.accelerate(model, tokenizer, draft=None)} | {
        (way, control): truedraft.accelerate(model, tokenizer, draft=f"{way}:model={draft}", control=control)
        for way in WAYS for control in ("fixed", "cost")
    }  # fmt: skip
    prompts = prompts_of(tokenizer)
    settings: dict[str, Any] = dict(max_new_tokens=tokens, do_sample=False)
    plain = [model.generate(ids, **settings) for ids in prompts]
    seconds: dict[Any, list[list[float]]] = {side: [[] for _ in prompts] for side in sides}
    exact, passes, emitted = dict.fromkeys(sides, True), dict.fromkeys(sides, 0), 0
    for turn in range(rounds + 1):
        for i, (ids, expected) in enumerate(zip(prompts, plain, strict=True)):
            emitted += (expected.shape[1] - ids.shape[1]) * (turn > 0)
            for side, fast in sides.items():
                start = time.perf_counter()
                found = fast.generate(ids, **settings)
                spent = time.perf_counter() - start
                exact[side] &= torch.equal(found, expected)
                if turn:
                    seconds[side][i].append(spent)
                    passes[side] += len(fast.report().passes)
    base = seconds["none", "cost"]
    return [
        {
            "target": Path(target).name, "draft": Path(draft).name, "way": way, "control": control,
            "exact": exact[way, control], "tokens_per_pass": round(emitted / passes[way, control], 3),
            "speed": round(statistics.median(
                a / b for mine, own in zip(base, spent, strict=True) for a, b in zip(mine, own, strict=True)
            ), 3),
            "speed_of_minima": round(sum(map(min, base)) / sum(map(min, spent)), 3),
            "ms_per_call": round(1e3 * statistics.median(call for calls in spent for call in calls), 2),
        }
        for (way, control), spent in seconds.items()
    ]  # fmt: skip


def prompts_of(tokenizer: Any) -> list[torch.Tensor]:
    texts = [assets.prompt("story.txt"), *assets.prompt("stories.txt").split("\n\n")][:3]
    return [tokenizer(text.lower(), return_tensors="pt").input_ids[:, :64] for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", metavar="MODEL", help="a target and its draft model, and so on")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--speeds", action="store_true", help="time the ways, instead of counting")
    parser.add_argument("--rounds", type=int, default=20, help="with --speeds, over all prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = (
        list(zip(args.pairs[::2], args.pairs[1::2], strict=True)) if args.pairs else PAIRS[: 1 if args.speeds else None]
    )
    found: dict[str, Any] = {"tokens": args.tokens, "results": []}
    if args.speeds:
        found |= {"machine": machine(), "threads": torch.get_num_threads(), "rounds": args.rounds}
    for target, draft in pairs:
        made = (target, draft, args.tokens)
        rows = timed(*made, args.rounds) if args.speeds else counted(*made)
        found["results"] += rows
        for row in rows:
            print(row, flush=True)
        if args.json:
            write_whole(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
