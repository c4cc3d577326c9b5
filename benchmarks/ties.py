"""Coarse dtypes: how many texts differ from `model.generate`, with near-ties kept and scored again, and what that costs.

    python benchmarks/ties.py MODEL ... --stories FILE [--texts 1000] [--tokens 120] [--dtype bfloat16] [--out FILE]

Greedy, a prompt at a time, on openings of stories (one story a line). `keep` is the default, `recheck` is
`accelerate(ties="recheck")`; both are run without drafts and with the default ones, whose texts must be the same. Times
are of the process, in turns on every tenth text. What is known is written after every tenth text, so that a long run may
be ended, and shorter ones compared; `--known FOLDER` keeps what `model.generate` wrote for a later run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import truedraft
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

SIDES: dict[str, dict[str, Any]] = {
    "keep": {"draft": None},
    "recheck": {"draft": None, "ties": "recheck"},
    "keep, drafts": {},
    "recheck, drafts": {"ties": "recheck"},
}
TIMED = 10  # every so many texts all sides take turns


def openings(path: Path, count: int) -> list[str]:
    """Beginnings of stories from all over a file, 30 to 107 characters up to the end of a word."""
    texts = [line for line in path.read_text().split("\n") if len(line) > 200]
    step = len(texts) / count
    return [texts[int(i * step)][: 30 + 7 * (i % 12)].rsplit(" ", 1)[0] for i in range(count)]


class Known:
    """What `model.generate` writes, kept in a file where one is given: a list of tokens a line."""

    def __init__(self, path: Path | None, write: Callable[[int], list[int]]):
        self.path, self.write = path, write
        self.texts = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []

    def __call__(self, i: int) -> list[int]:
        if i == len(self.texts):
            self.texts.append(self.write(i))
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps(self.texts[i]) + "\n")
        return self.texts[i]  # type: ignore[no-any-return]


def compared(
    name: str, prompts: Sequence[str], tokens: int, dtype: str, known: Path | None
) -> Iterator[dict[str, Any]]:
    """The figures of one model after every few texts."""
    model, tokenizer = load(name, dtype)
    sides = {side: truedraft.accelerate(model, tokenizer, **given) for side, given in SIDES.items()}
    encoded = [tokenizer(p, return_tensors="pt", return_token_type_ids=False).input_ids for p in prompts]

    def written(generate: Any, ids: Tensor) -> list[int]:
        return generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    expected = Known(known, lambda i: written(model.generate, encoded[i]))
    differ = dict.fromkeys(SIDES, 0)
    seconds = dict.fromkeys(("model.generate", *SIDES), 0.0)
    near = chosen = 0.0
    for i, ids in enumerate(encoded):
        timed = i % TIMED == 0
        texts: dict[str, list[int]] = {}
        for side in SIDES if timed else ("keep", "recheck"):
            began = time.process_time()
            texts[side] = written(sides[side].generate, ids)
            seconds[side] += timed * (time.process_time() - began)
            differ[side] += texts[side] != expected(i)
        report = sides["keep"].report()
        near, chosen = near + (report.near_ties or 0.0) * report.tokens, chosen + report.tokens
        if timed:
            began = time.process_time()
            assert written(model.generate, ids) == expected(i), "model.generate does not repeat itself"
            seconds["model.generate"] += time.process_time() - began
            if sides["keep"].target.runner.name == "compiled pass":  # the same at every width
                assert texts["keep"] == texts["keep, drafts"]
                assert texts["recheck"] == texts["recheck, drafts"], f"drafts changed text {i}"
        if timed or i == len(encoded) - 1:
            yield {
                "model": Path(name).name, "dtype": dtype, "runtime": sides["keep"].target.runtime, "texts": i + 1,
                "tokens": tokens, "noise": sides["keep"].target.noise, "near_ties": near / chosen,
                "differ": {side: differ[side] for side in ("keep", "recheck")},
                "differ_per_1000": {s: round(1000 * differ[s] / (i + 1), 1) for s in ("keep", "recheck")},
                "times_of_model.generate": {s: round(t / seconds["model.generate"], 3) for s, t in seconds.items()},
            }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--known", type=Path, help="a folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    prompts = openings(arguments.stories, arguments.texts)
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.models:
        known = arguments.known and arguments.known / f"ref-{Path(name).name}.jsonl"
        for figures in compared(name, prompts, arguments.tokens, arguments.dtype, known):
            found[name] = figures
            if arguments.out:
                write_whole(arguments.out, json.dumps({"machine": machine(), "models": list(found.values())}, indent=1))
        print(json.dumps(found[name], indent=1), flush=True)
