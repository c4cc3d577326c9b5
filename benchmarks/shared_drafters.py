"""What drafters gain that share the target's work, or their own layers: GliDe beside EAGLE, a draft model with exits.

    python benchmarks/shared_drafters.py --target MODEL --stories FILE --runs FOLDER --json FILE [--only NAME ...]

GliDe, the same drafter without its cross-attention, EAGLE and EAGLE-3 are trained for the target on the same texts in
the same order, for the same number of steps; a draft model of three layers, which begin as the target's first ones, is
trained with exits after each (sorted fine-tuning) on the same texts. What is in the folder of runs is not trained
again, and `--only` replaces the rows of some drafters in the file. All figures are counts, which do not depend on the
load of the machine: tokens per pass of the target, and for the draft model with exits the layers that its passes read.
Every text is compared with that of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import truedraft
from truedraft import registry
from truedraft.drafters.heads.glide import Training
from truedraft.drafters.models._nested_reader import NestedReader
from truedraft.drafters.models.s2d import SortedLoss
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.train.drafter import train_drafter
from truedraft.train.loop import Plan, fit

HELD_OUT, LONGEST = 64, 700  # texts at the end of the file; characters of a text
PROMPT, TOKENS = 24, 48  # tokens of a prompt, and of what follows it
HEADS = ("eagle", "eagle3", "glide", "glide-without-cross")
EXITS, LAYERS = (1, 2, 3), 3
DRAFTS = 5  # tokens of a chain
SAMPLED = dict(do_sample=True, temperature=0.8, top_k=0)


@dataclass
class WithoutCross(Training):
    """GliDe without what its layers read of the target: the output of the cross-attention is zero and stays zero."""

    def begin(self, model: Any) -> None:
        super().begin(model)
        for layer in self.module.decoder_layers:  # type: ignore[union-attr]
            nn.init.zeros_(layer.cross_attn.o_proj.weight)  # type: ignore[union-attr, arg-type]
            layer.cross_attn.requires_grad_(False)  # type: ignore[union-attr]


def texts_of(path: Path) -> tuple[list[str], list[str]]:
    """Texts to train on, and those that are held out."""
    parts = [part.strip()[:LONGEST] for part in re.split(r"(?<!\n)\n(?!\n)", path.read_text("utf-8"))]
    parts = [part for part in parts if len(part) > LONGEST // 2]
    return parts[:-HELD_OUT], parts[-HELD_OUT:]


def learner_of(name: str, vocabulary: int) -> Any:
    if name == "glide-without-cross":
        return WithoutCross(loss_name="kl", vocabulary=vocabulary)
    knobs = {"glide": dict(loss_name="kl"), "eagle3": dict(steps=3), "eagle": {}}[name]
    if name != "eagle":
        knobs = {**knobs, "vocabulary": vocabulary}
    return registry.method("drafters", name).learner(**knobs)  # type: ignore[misc]


def train_head(
    name: str, target: str, texts: Sequence[str], runs: Path, steps: int, batch: int, vocabulary: int
) -> None:
    model, tokenizer = load(target)
    torch.manual_seed(0)
    train_drafter(
        learner_of(name, vocabulary), model.float(), tokenizer, texts, runs / name,
        Plan(minutes=1e9, steps=steps, every=1e9), answers=[None] * len(texts), batch=batch,
    )  # fmt: skip


def nested(target: str) -> Any:
    """The first layers of the target, with its norm and output head."""
    model, _ = load(target)
    model = model.float()
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return model


def train_nested(target: str, texts: Sequence[str], runs: Path, steps: int, batch: int) -> None:
    model, (_, tokenizer) = nested(target), load(target)
    model.requires_grad_(True)
    sorted_loss = SortedLoss(model, EXITS)

    def batches() -> Iterator[torch.Tensor]:
        rows, generator = max(batch // 128, 1), torch.Generator().manual_seed(0)
        while True:
            some = [texts[i] for i in torch.randint(len(texts), (rows,), generator=generator).tolist()]
            found = tokenizer(
                some, return_tensors="pt", padding=True, truncation=True, max_length=128, padding_side="right"
            )
            yield found.input_ids.masked_fill(found.attention_mask == 0, -1)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        return sorted_loss(ids.clamp_min(0), ids >= 0)

    fit(
        model, loss, batches(), Plan(minutes=1e9, steps=steps, every=1e9, lr=1e-3),
        validate=lambda: {"tokens_per_pass": 0.0}, save=lambda _: None, log=runs / "nested.jsonl",
    )  # fmt: skip
    torch.save(model.state_dict(), runs / "nested.pt")


@dataclass
class Measured:
    """Decodes held-out prompts with drafters, and compares the texts with those of plain decoding."""

    model: Any
    tokenizer: Any
    prompts: list[torch.Tensor]

    def __post_init__(self) -> None:
        self._plain: dict[bool, list[torch.Tensor]] = {}

    def plain(self, sampled: bool) -> list[torch.Tensor]:
        """The model's own texts; sampled ones of a seed each."""
        if sampled not in self._plain:
            found = []
            for seed, ids in enumerate(self.prompts):
                torch.manual_seed(seed)
                found.append(self.model.generate(ids, max_new_tokens=TOKENS, **self._given(sampled)))
            self._plain[sampled] = found
        return self._plain[sampled]

    @staticmethod
    def _given(sampled: bool) -> dict[str, Any]:
        return SAMPLED if sampled else dict(do_sample=False)

    def __call__(self, draft: Any, sampled: bool) -> dict[str, Any]:
        fast = truedraft.accelerate(self.model, self.tokenizer, draft=draft, control="fixed")
        tokens = passes = 0
        exact = True
        for seed, (ids, expected) in enumerate(zip(self.prompts, self.plain(sampled), strict=True)):
            torch.manual_seed(seed)
            exact &= torch.equal(fast.generate(ids, max_new_tokens=TOKENS, **self._given(sampled)), expected)
            report = fast.report()
            tokens, passes = tokens + report.tokens, passes + report.row_passes
        assert exact, "another text than that of plain decoding"
        return {"tokens": tokens, "passes": passes, "mean_acceptance_length": round(tokens / passes, 3), "exact": exact}


def measured_head(name: str, measured: Measured, runs: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    chain = dict(nodes=DRAFTS, depth=DRAFTS, top_k=1)
    tree = dict(nodes=24, depth=6, top_k=6)
    method, folder = name.removesuffix("-without-cross"), str(runs / name)
    log = json.loads((runs / name / "log.jsonl").read_text().splitlines()[-1])
    weights = None
    ways = [("chain of 5", method, chain), ("tree of 24", method, tree)]
    if method == "eagle":
        ways = [("chain of 5", "eagle2", chain), ("tree of 24", "eagle2", tree)]
    if method == "glide":
        ways.append(("cape", "cape", {}))
    for way, drafter, knobs in ways:
        for sampled in (False, True):
            if drafter == "cape":
                source = registry.load("drafters", "glide", model=folder)
                draft = registry.load("drafters", "cape", source=source)
            else:
                draft = registry.load("drafters", drafter, model=folder, **knobs)
            found = measured(draft, sampled)
            head = getattr(draft, "distributions", draft).head
            weights = sum(p.numel() for p in head.parameters())
            rows.append(
                {
                    "drafter": name, "way": way, "sampled": sampled, "weights": weights, "steps": log["steps"],
                    "trained_tokens": log["tokens"], **found,
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def measured_exits(target: str, measured: Measured, runs: Path) -> list[dict[str, Any]]:
    model = nested(target)
    model.load_state_dict(torch.load(runs / "nested.pt"))
    counts = {"passes": 0, "layers": 0}
    run = NestedReader._pass

    def counted(self: NestedReader, first: int, last: int, *given: Any) -> Any:
        counts["passes"] += last > first
        counts["layers"] += last - first
        return run(self, first, last, *given)

    NestedReader._pass = counted  # type: ignore[method-assign]
    rows = []
    ways = [(f"{exit} of {LAYERS} layers", dict(exits=str(exit), thresholds="0")) for exit in EXITS]
    for first, second in ((0.5, 0.4), (0.7, 0.6), (0.9, 0.8)):
        ways.append((f"exits at {first}, {second}", dict(exits="1x2x3", thresholds=f"{first}x{second}")))
    for way, knobs in ways:
        for sampled in (False, True):
            counts.update(passes=0, layers=0)
            draft = registry.load("drafters", "s2d", model=model, length=DRAFTS, confidence=0.3, **knobs)
            found = measured(draft, sampled)
            drafted = found["tokens"] - found["passes"]  # tokens that passes of the target were saved for
            rows.append(
                {
                    "drafter": "exits", "way": way, "sampled": sampled, **found, "draft_passes": counts["passes"],
                    "draft_layers": counts["layers"], "tokens_per_draft_layer": round(drafted / counts["layers"], 4),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="nano")
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=(*HEADS, "exits"), default=(*HEADS, "exits"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens that heads with their own output draft")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    texts, held = texts_of(args.stories)
    args.runs.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(args.target)
    prompts = [tokenizer(text, return_tensors="pt").input_ids[:, :PROMPT] for text in held[: args.prompts]]
    measured = Measured(model.float(), tokenizer, prompts)
    for name in args.only:
        given = args.target, texts, args.runs, args.steps, args.batch
        if name == "exits":
            if not (args.runs / "nested.pt").exists():
                train_nested(*given)
            rows = measured_exits(args.target, measured, args.runs)
        else:
            if not (args.runs / name / "drafter.safetensors").exists():
                train_head(name, *given, args.vocabulary)
            rows = measured_head(name, measured, args.runs)
        found = json.loads(args.json.read_text()) if args.json.exists() else {"results": []}
        settings = dict(steps=args.steps, batch=args.batch, prompts=len(prompts), tokens=TOKENS, texts=len(texts))
        kept = [row for row in found["results"] if row["drafter"] != name]
        found = {"target": Path(args.target).name, "settings": settings, "results": [*kept, *rows]}
        write_whole(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
