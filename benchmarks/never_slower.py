"""Drafts beside none on one model, by kind of prompt and by what is known of its passes: never slower is the promise.

    python benchmarks/never_slower.py MODEL [--draft auto] [--rounds 5] [--tokens 96] [--states fresh warm] --json FILE

Calls with drafts, under the cost control, and calls without alternate in random order on the same prompt. `fresh`: the
first call of an accelerated model on a machine that has stored no times of passes; `stored`: the first call where all
were stored; `warm`: calls of a model that has made others, with what its drafters learnt forgotten, so that they copy
from the prompt and the text alone. The ratio is the time without drafts over that with drafts, prompts included, of the
least times of all rounds, since other work only adds time; medians of the rounds are kept too. A second side without
drafts is the control of the measurement. The text of all sides must be the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

CODE = """class Store:
    def __init__(self, path):
        self.path = path
        self.items = {}

    def add(self, key, value):
        if key in self.items:
            raise KeyError(key)
        self.items[key] = value

    def remove(self, key):
        if key not in self.items:
            raise KeyError(key)
        del self.items[key]

    def find(self, key, default=None):
        return self.items.get(key, default)
"""
REPORT = """The harbour of the town froze early this year. On Monday the last ferry left with forty passengers, and
since then supplies have come by road alone. The mayor said on Tuesday that there is food for three weeks, but that fuel
for heating will last for only ten days. Two snow ploughs are on their way from the capital. The school stays closed
until Friday, and its hall is open to all whose houses are cold."""
PROMPTS = {
    "writing": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "question": "Why is the sky blue during the day and red in the evening?",
    "maths": "A train leaves at 9:40 and arrives at 13:05. It stops for 12 minutes twice. How long does it move?",
    "code": "Write a Python function that returns the longest increasing run of a list of numbers.",
    "translation": f"Translate into French:\n{REPORT[:220]}",
    "summary": f"Summarise this report in three sentences:\n{REPORT}",
    "retrieval": f"{REPORT}\n\nFor how many days will the fuel last, and who said so? Answer in a full sentence.",
    "edit": f"Rename the class Store to Shelf, and print the whole file again:\n{CODE}",
}  # fmt: skip
SIDES = ("drafts", "none", "control")
BEFORE = 4  # calls of a warm side before those that are timed


class Sides:
    """The accelerated models."""

    def __init__(self, model: Any, tokenizer: Any, draft: str):
        self._new = lambda: truedraft.accelerate(model, tokenizer, draft=draft)
        self.fast = {name: truedraft.accelerate(model, tokenizer, draft=None) for name in SIDES}

    def fresh(self) -> None:
        """A new one with drafts, as after the start of a process; those without keep nothing from call to call."""
        del self.fast["drafts"]
        gc.collect()
        self.fast["drafts"] = self._new()

    def timed(self, inputs: Any, tokens: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Seconds of a call by side, and the report of the one with drafts."""
        spent, texts = {}, {}
        for name in random.sample(SIDES, len(SIDES)):
            began = time.perf_counter()
            texts[name] = self.fast[name].generate(**inputs, max_new_tokens=tokens, do_sample=False)
            spent[name] = time.perf_counter() - began
        assert all(torch.equal(text, texts["none"]) for text in texts.values()), "the texts differ"
        report = self.fast["drafts"].report()
        return spent, {"tokens": report.tokens, "passes": len(report.passes), "seconds": report.seconds}


def calls(sides: Sides, state: str, inputs: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each prompt and round."""
    rows = []
    if state == "warm":
        sides.fresh()
        for kind in list(inputs)[:BEFORE]:
            sides.timed(inputs[kind], args.tokens)
    for turn in range(args.rounds):
        for kind, given in inputs.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["XDG_CACHE_HOME"] = folder if state == "fresh" else args.stored
                if state == "warm":
                    sides.fast["drafts"].forget()
                else:
                    sides.fresh()
                spent, report = sides.timed(given, args.tokens)
            rows.append({"state": state, "kind": kind, "round": turn, "seconds": spent, "report": report})
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratios by cell, of the drafts and of the control: of the least times over rounds, and their medians."""
    cells: dict[str, Any] = {}
    for state, kind in dict.fromkeys((row["state"], row["kind"]) for row in rows):
        own = [row for row in rows if (row["state"], row["kind"]) == (state, kind)]
        ratio: dict[str, float] = {}
        for name in ("drafts", "control"):
            none, other = ([row["seconds"][side] for row in own] for side in ("none", name))
            ratio[name] = min(none) / min(other)
            ratio[f"median {name}"] = statistics.median(a / b for a, b in zip(none, other, strict=True))
        per_pass = statistics.median(row["report"]["tokens"] / row["report"]["passes"] for row in own)
        cells[f"{state} {kind}"] = {**ratio, "tokens_per_pass": per_pass}
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--kinds", nargs="+", default=list(PROMPTS))
    parser.add_argument("--states", nargs="+", choices=["fresh", "stored", "warm"], default=["fresh", "stored", "warm"])
    parser.add_argument("--name", help="of the model, for --json")
    parser.add_argument("--json", type=Path, help="the run of the same model and drafter is replaced")
    args = parser.parse_args()
    model, tokenizer = load(args.model, **({} if args.dtype == "auto" else {"dtype": args.dtype}))
    inputs = {
        kind: tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPTS[kind]}], add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        )
        for kind in args.kinds
    }  # fmt: skip
    random.seed(0)
    found: dict[str, Any] = {"machine": machine(), "model": args.name or Path(args.model).name, "draft": args.draft}
    found |= {"dtype": str(model.dtype).removeprefix("torch."), "rows": []}
    with tempfile.TemporaryDirectory() as args.stored:
        os.environ["XDG_CACHE_HOME"] = args.stored
        sides = Sides(model, tokenizer, args.draft)
        sides.fresh()
        for given in inputs.values():  # until the times of passes are stored
            sides.fast["drafts"].generate(**given, max_new_tokens=4 * args.tokens, do_sample=False)
        for state in args.states:
            found["rows"] += calls(sides, state, inputs, args)
            for cell, ratios in summary([row for row in found["rows"] if row["state"] == state]).items():
                print(f"{cell:20}", {name: round(value, 3) for name, value in ratios.items()}, flush=True)
    if args.json:
        before = json.loads(args.json.read_text("utf-8"))["runs"] if args.json.exists() else []
        cells = {"cells": summary(found.pop("rows")), "rounds": args.rounds, "tokens": args.tokens}
        kept = [run for run in before if (run["model"], run["draft"]) != (found["model"], found["draft"])]
        write_whole(args.json, json.dumps({"runs": [*kept, found | cells]}, indent=1))


if __name__ == "__main__":
    main()
