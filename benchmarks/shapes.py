"""What `truedraft shapes` predicts of draft models, and what decoding with them then counts.

    python benchmarks/shapes.py --target nano --models nano-draft FOLDER ... [--seconds] --json FILE

Tokens per pass by the number of drafted tokens are predicted by replay, from the target's responses to some prompts;
then other prompts are decoded with the same drafts, each text that of `model.generate`. Costs of a token are in passes
of the draft model, where a pass of the target costs 5, 10, 20 or 50 of them, and are counted. With `--seconds`, on an
idle machine, the tokens per second that `truedraft shapes` predicts of times and replay are compared with those of
decoding. Prompts are beginnings of paragraphs of stories that `nano` was not trained on, nor what is distilled from it
on the prompts of `tools/head_prompts.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from stopping import STORIES, WORDS, counted
from truedraft import registry
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.train.batches import Reader, sorted_groups
from truedraft.train.responses import Responding, target_responses
from truedraft.train.shapes import BATCH, described, level_seconds, pass_seconds, replayed

RATIOS = (5, 10, 20, 50)


def beginnings() -> list[str]:
    """Of paragraphs of the stories that `tools/train_nano.py` holds out."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
    from train_nano import held_out, stories

    texts = [paragraph.split() for story in stories(STORIES) if held_out(story) for paragraph in story.split("\n\n")]
    return list(dict.fromkeys(" ".join(words[:WORDS]) for words in texts if len(words) > 2 * WORDS))


class Pair:
    """A target with prompts to predict from, and others to decode."""

    def __init__(self, target: str, prompts: int, tokens: int, most: int):
        self.model, self.tokenizer = load(target)
        self.tokens, self.most = tokens, most
        texts = beginnings()
        fast = truedraft.accelerate(self.model, self.tokenizer, draft=None)
        with tempfile.TemporaryDirectory() as folder:
            self.lines = target_responses(
                fast, self.tokenizer, texts[:prompts], Path(folder), print, Responding(max_new_tokens=tokens)
            )
        self.context = sum(len(prompt) for prompt, _ in self.lines) // len(self.lines) + tokens // 2
        self.fast = fast
        self.ids = [
            self.tokenizer(text, return_tensors="pt", return_token_type_ids=False).input_ids
            for text in texts[-prompts:]
        ]
        self.plain = [self.model.generate(one, max_new_tokens=tokens, do_sample=False) for one in self.ids]  # type: ignore[operator]

    def rows(self, name: str, seconds: bool) -> list[dict[str, Any]]:
        """A row by number of drafted tokens."""
        small = load(name)[0].float()
        read = Reader(self.model, ())
        predicted = replayed(small, map(read, sorted_groups(self.lines, BATCH, read.width)), self.most)
        config = small.config.get_text_config(decoder=True)
        shape = {
            "draft": Path(name).name, "layers": config.num_hidden_layers, "width": config.hidden_size,
            "weights": sum(weight.numel() for weight in small.parameters()),
        }  # fmt: skip
        found = []
        for length in range(1, self.most + 1):
            draft = registry.load("drafters", "draft-model", model=small, length=length)
            given = self.model, self.tokenizer, self.ids, self.plain, self.tokens
            costs = counted(*given, "greedy", draft, "fixed", 0)
            row = {**shape, "length": length, "predicted": predicted[length], **costs}
            row["measured"] = round(costs["tokens"] / costs["passes"], 3)
            found.append(row)
            print(row, flush=True)
        return (
            [{**row, **rate} for row, rate in zip(found, self.rates(small, predicted), strict=True)]
            if seconds
            else found
        )

    def rates(self, small: Any, predicted: Sequence[float]) -> list[dict[str, float]]:
        """Tokens per second without the passes over prompts, as predicted, and of decoding, by drafted tokens."""
        passes = pass_seconds(self.fast.target, self.context, range(1, self.most + 2))
        level = level_seconds(truedraft.accelerate(small, draft=None).target, self.context, self.most)
        shape = described("", small, level, passes, tuple(predicted))
        found = []
        for length in range(1, self.most + 1):
            draft = registry.load("drafters", "draft-model", model=small, length=length)
            fast = truedraft.accelerate(self.model, self.tokenizer, draft=draft, control="fixed")
            fast.generate(self.ids[0], max_new_tokens=8, do_sample=False)  # what is made once
            tokens = spent = 0.0
            for ids, expected in zip(self.ids, self.plain, strict=True):
                began = time.perf_counter()
                assert torch.equal(fast.generate(ids, max_new_tokens=self.tokens, do_sample=False), expected)
                spent += time.perf_counter() - began - fast.report().seconds["prefill"]
                tokens += fast.report().tokens - 1
            rate = shape.tokens_per_pass[length] / (length * level + passes[length])
            found.append({"predicted_rate": round(rate, 1), "measured_rate": round(tokens / spent, 1)})
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="nano")
    parser.add_argument("--models", nargs="+", default=["nano-draft"])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not STORIES.exists():
        raise SystemExit(f"{STORIES} is not on this machine: nothing was measured")
    pair = Pair(args.target, args.prompts, args.tokens, args.length)
    rows = [row for name in args.models for row in pair.rows(name, args.seconds)]
    for row in rows:
        for side in ("predicted", "measured"):
            per_pass = row["steps"] / row["passes"] if side == "measured" else row["length"]
            row[f"{side}_costs"] = {ratio: round((ratio + per_pass) / row[side], 3) for ratio in RATIOS}
    if args.json:
        settings = {"target": Path(args.target).name, "prompts": args.prompts, "tokens": args.tokens}
        found = {"machine": machine(), **settings} if args.seconds else settings
        write_whole(args.json, json.dumps({**found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
