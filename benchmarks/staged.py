"""Draft models that are drafted for themselves: tokens per pass of the target, and passes of the draft model.

    python benchmarks/staged.py [--pairs TARGET DRAFT ...] [--tokens 96] [--json FILE]

Every method decodes the same stories, one at a time, with drafts in full; greedily, and sampled with a seed. Cold: what
it keeps of texts is forgotten before each story. Warm: it has decoded other stories before, and keeps what it had of
them. One table of `staged-sd` is counted first, from text that the draft model samples by itself. Texts are compared
with those of `model.generate`. The figures are counts, which do not depend on other load.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from stories import beginnings
from truedraft import registry
from truedraft.drafters.models._reader import Reader
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.stores.corpus import Corpus

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
PAIRS = [("nano", "nano-draft"), (str(WEIGHTS / "bitllama_3M"), str(WEIGHTS / "stories260K"))]
ALONE = ("draft-model:length=4", "draft-model:length=12", "staged-sd:guesses=0")  # the draft model drafts by itself
METHODS = (*ALONE, "cs-drafting", "ouroboros", "ouroboros-12", "staged-sd")
TABLE = "staged-sd, its table counted first"
BEFORE = 2  # stories that are decoded before those that count
RULES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "seeded": {"do_sample": True}}
SAMPLED = (64, 200)  # texts that the draft model samples behind a few tokens for the table, and tokens of each
SEED = 5


class Counted:
    """The passes of draft models, while it is entered: each level of a draft is one."""

    def __enter__(self) -> Counted:
        self.passes = 0
        self._own = {name: getattr(Reader, name) for name in ("score", "expand", "decode_greedily")}
        for name in ("score", "expand"):
            setattr(Reader, name, self._counting(self._own[name]))
        Reader.decode_greedily = lambda *args: False  # type: ignore[method-assign]
        return self

    def _counting(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            self.passes += 1
            return method(*args)

        return call

    def __exit__(self, *error: object) -> None:
        for name, method in self._own.items():
            setattr(Reader, name, method)


def texts_of(small: Any, prompts: Sequence[torch.Tensor]) -> Corpus:
    """A corpus of texts that a draft model samples by itself behind the first tokens of prompts."""
    count, length = SAMPLED
    torch.manual_seed(SEED)
    given = dict(max_new_tokens=length, min_new_tokens=length, do_sample=True)
    return Corpus.built(
        [text for ids in prompts for text in small.generate(ids[:, :2].repeat(count, 1), **given).tolist()]
    )


def generated(model: Any, ids: torch.Tensor, tokens: int, rule: str) -> torch.Tensor:
    torch.manual_seed(SEED)
    found: torch.Tensor = model.generate(ids, max_new_tokens=tokens, **RULES[rule])
    return found


def figures(
    fast: Any, prompts: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], tokens: int, rule: str, warm: bool
) -> dict[str, Any]:
    """Of one method, over all prompts but the first ones."""
    emitted = passes = drafts = nodes = draft_passes = 0
    exact = True
    fast.forget()
    for i, (ids, expected) in enumerate(zip(prompts, plain, strict=True)):
        if i < BEFORE and not warm:
            continue
        if not warm:
            fast.forget()
        with Counted() as counted:
            exact &= torch.equal(generated(fast, ids, tokens, rule), expected)
        if i >= BEFORE:
            offered = [one.offered for made in fast.report().passes for one in made.emitted]
            emitted, passes = emitted + fast.report().tokens, passes + len(offered)
            drafts, nodes = drafts + sum(map(bool, offered)), nodes + sum(offered)
            draft_passes += counted.passes
    return {
        "exact": exact, "tokens_per_pass": emitted / passes, "nodes_per_draft": nodes / drafts,
        "draft_passes_per_draft": draft_passes / drafts, "draft_passes_per_token": draft_passes / emitted,
    }  # fmt: skip


def measured(target: str, draft: str, tokens: int) -> list[dict[str, Any]]:
    """A row by method, rule, and what the method keeps of other texts."""
    (model, tokenizer), (small, _) = load(target), load(draft)
    prompts = beginnings(tokenizer)
    corpus = texts_of(small, prompts[:BEFORE])
    rows = []
    for rule in RULES:
        plain = [generated(model, ids, tokens, rule) for ids in prompts]
        for method in (*METHODS, TABLE):
            kept = {"corpus": corpus} if method == TABLE else {}
            drafter = registry.load("drafters", method.partition(",")[0], model=small, **kept)
            fast = truedraft.accelerate(model, tokenizer, draft=drafter, control="fixed")
            named = {"target": Path(target).name, "draft": Path(draft).name, "rule": rule, "way": method}
            for state in ("cold",) if method in ALONE else ("cold", "warm"):
                rows.append({**named, "state": state, **figures(fast, prompts, plain, tokens, rule, state == "warm")})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", metavar="MODEL", help="a target and its draft model, and so on")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = list(zip(args.pairs[::2], args.pairs[1::2], strict=True)) if args.pairs else PAIRS
    rows = [row for pair in pairs for row in measured(*pair, args.tokens)]
    if args.json:
        write_whole(args.json, json.dumps({"tokens": args.tokens, "rows": rows}, indent=1))
    assert all(row["exact"] for row in rows), "a text differs from that of model.generate"


if __name__ == "__main__":
    main()
