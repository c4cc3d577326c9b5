"""Whether rows that are drafted for in batches have the text that each has alone: exact and prefix match rates.

    python benchmarks/equivalence.py --stories FILE [--models NAME ...] [--rows 16] [--tokens 48] [--out FILE]

The experiment of EQSPEC ("Batch Speculative Decoding Done Right"): rows of different prompts and lengths in batches of
1, 2, 4, 8 and 16, drafts always in full, so that rows accept different numbers of tokens in each pass. Every row is in
one batch of each size. A row is compared with

- `model.generate` of the row alone, without padding and without drafts (greedy; sampled in batches of one, under the
  same `torch.manual_seed`): in bf16 its own passes round differently than others do;
- plain decoding of the row alone by the same pass: sampled with the row's own seed. Where the compiled pass runs, its
  bits depend neither on the batch nor on drafts, so that any other text is a fault.

Beside it, transformers alone: its assisted generation, which refuses batches, and its plain generation of the same
batches, padded at the left. The models: `nano`; `nano` stretched to 0.1 B parameters; and folders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft.bench.sizes import size_of
from truedraft.bench.stretched import stretched
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

BATCHES = (1, 2, 4, 8, 16)
STRETCHED = "nano-0.1B"
DRAFTS = {  # model -> its drafters
    "nano": ("draft-model:model=nano-draft", "prompt-lookup", "eagle3", "auto"),
    STRETCHED: ("draft-model:model=nano-draft",),
}
OTHERS = ("prompt-lookup", "auto")
PUBLISHED = 0.95  # about, of the paper, residual mismatches being rounding
Ids = list[list[int]]
Generate = Callable[..., Any]


def openings(path: Path, count: int, tokenizer: Any) -> Ids:
    """Tokens of beginnings of stories spread over a file, of different lengths."""
    texts = [line for line in path.read_text().split("\n") if len(line) > 300]
    step = len(texts) // count
    return [tokenizer(texts[i * step][: 20 + 23 * i % 211])["input_ids"] for i in range(count)]


def padded(rows: Ids, pad: int) -> dict[str, torch.Tensor]:
    """Rows padded at the left, with their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def texts(generate: Generate, rows: Ids, pad: int, **settings: Any) -> Ids:
    """The new tokens of rows in one batch, up to the first that ends a text."""
    given = padded(rows, pad)
    new = generate(**given, **settings)[:, given["input_ids"].shape[1] :].tolist()
    end = settings["eos_token_id"]
    return [row[: row.index(end) + 1] if end in row else row for row in new]


def matching(found: Ids, expected: Ids) -> dict[str, float | int]:
    """Rates of rows that are equal, and of tokens before the first that differs."""
    exact, prefix = 0, 0.0
    for one, other in zip(found, expected, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        exact += one == other
        prefix += same / max(len(one), len(other), 1)
    return {"exact": exact / len(found), "prefix": prefix / len(found)}


class Experiment:
    """The rows of one model in one dtype, and the settings of their generation."""

    def __init__(self, name: str, dtype: str, args: argparse.Namespace):
        self.model, self.tokenizer = load("nano" if name == STRETCHED else name, dtype)
        if name == STRETCHED:
            layers, hidden = size_of("0.1B", "nano")
            self.model = stretched(self.model, layers=layers, hidden=hidden)
        self.name, self.dtype = name, dtype
        self.emitted = self.passes = 0  # tokens, and passes of rows, of the calls of a batch size
        self.pad = self.tokenizer.pad_token_id or 0
        self.rows = openings(args.stories, args.rows, self.tokenizer)
        self.settings = dict(
            max_new_tokens=args.tokens // 2 if name == STRETCHED else args.tokens, pad_token_id=self.pad,
            eos_token_id=self.tokenizer.eos_token_id,
        )  # fmt: skip

    def alone(self, generate: Generate, sampled: bool, **more: Any) -> Ids:
        """Every row by itself; sampled under the torch seed of its number."""
        found: Ids = []
        for i, row in enumerate(self.rows):
            torch.manual_seed(i)
            found += texts(generate, [row], self.pad, do_sample=sampled, **self.settings, **more)
        return found

    def seeded(self, fast: Any, sampled: bool, batch: int) -> Ids:
        """All rows in batches; sampled with the seeds of their numbers."""
        found: Ids = []
        for first in range(0, len(self.rows), batch):
            some = self.rows[first : first + batch]
            seeds = {"seed": [first + i for i in range(len(some))]} if sampled else {}
            found += texts(fast.generate, some, self.pad, do_sample=sampled, **self.settings, **seeds)
            of_rows = [emission for each in fast.report().passes for emission in each.emitted]
            self.passes += len(of_rows)
            self.emitted += sum(len(emission.tokens) for emission in of_rows)
        return found

    def run(self, args: argparse.Namespace) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        own: Any = self.model.generate
        for sampled in (False, True):
            expected = self.alone(own, sampled)
            plain = truedraft.accelerate(self.model, self.tokenizer, draft=None)
            reference = self.seeded(plain, sampled, 1)
            shared = {
                "model": self.name, "dtype": self.dtype, "runtime": plain.target.runtime.split(" (")[0],
                "rule": "seeded" if sampled else "greedy", "rows": len(self.rows),
                "tokens": self.settings["max_new_tokens"],
            }  # fmt: skip
            for draft in DRAFTS.get(self.name, OTHERS):
                fast: Any = truedraft.accelerate(self.model, self.tokenizer, draft=draft, control="fixed")
                for batch in BATCHES:
                    fast.forget()
                    self.emitted = self.passes = 0
                    made = self.seeded(fast, sampled, batch)
                    one = {**shared, "side": draft, "batch": batch, "plain": matching(made, reference)}
                    one["tokens_per_pass"] = self.emitted / self.passes
                    if not sampled:
                        one["generate"] = matching(made, expected)
                    elif batch == 1:
                        one["generate"] = matching(self.alone(fast.generate, sampled), expected)
                    found.append(one)
                    print(json.dumps(one), flush=True)
            if not sampled:
                found += [{**shared, **one} for one in self.transformers(expected)]
        return found

    def transformers(self, expected: Ids) -> list[dict[str, Any]]:
        """What transformers does of this by itself: greedy, against its own text of each row alone."""
        own: Any = self.model.generate
        found = []
        assistants: dict[str, dict[str, Any]] = {"transformers prompt lookup": {"prompt_lookup_num_tokens": 10}}
        if self.name == "nano":
            assistants["transformers assisted"] = {"assistant_model": load("nano-draft", self.dtype)[0]}
        for side, more in assistants.items():
            one: dict[str, Any] = {"side": side, "batch": 1}
            one["generate"] = matching(self.alone(own, False, **more), expected)
            found.append(one)
            try:
                texts(own, self.rows[:2], self.pad, do_sample=False, **self.settings, **more)
            except ValueError as error:
                found.append({"side": side, "batch": 2, "refused": str(error)})
        for batch in BATCHES:
            made: Ids = []
            for first in range(0, len(self.rows), batch):
                made += texts(own, self.rows[first : first + batch], self.pad, do_sample=False, **self.settings)
            found.append({"side": "transformers plain", "batch": batch, "generate": matching(made, expected)})
        for one in found:
            print(json.dumps(one), flush=True)
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True, help="a story on each line")
    parser.add_argument("--models", nargs="+", default=["nano", STRETCHED])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a row; half as many where stretched")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    for name in args.models:
        for dtype in args.dtypes:
            write(Experiment(name, dtype, args).run(args), args)


def write(found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the results of a model in a dtype, in place of earlier ones of it."""
    for one in found:
        one["model"] = Path(one["model"]).name
    if args.out is None:
        return
    before = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    new = {(one["model"], one["dtype"]) for one in found}
    kept = [one for one in before if (one["model"], one["dtype"]) not in new]
    results = {"machine": machine(), "published": PUBLISHED, "results": [*kept, *found]}
    write_whole(args.out, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
