"""How many texts in a coarse dtype differ from `model.generate`, near-ties kept or rechecked, and the time of both.

    python benchmarks/ties.py MODEL ... --stories FILE [--texts 1000] [--tokens 120] [--dtype bfloat16] [--out FILE]

Greedy, a prompt at a time, on openings of stories (one story a line). `keep` is the default, `recheck` is
`accelerate(ties="recheck")`. On every fiftieth text all ways generate in turns: with and without drafts they must
give the same text, and the times are those of the process in these turns. A compiled pass gives the same bits at every
width, so for the other texts one pass over the text of `model.generate` shows where each way differs: `keep` where the
best token is another, `recheck` where it is another and no near-tie. In other runtimes all texts are generated.

`--expected FOLDER` keeps the texts of `model.generate` in a file for each model; `--texts 0` uses all texts in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import truedraft
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.runtime.compiled import CompiledPass
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree, Prompt

SIDES: dict[str, dict[str, Any]] = {
    "keep": {"draft": None},
    "recheck": {"draft": None, "ties": "recheck"},
    "keep, drafts": {},
    "recheck, drafts": {"ties": "recheck"},
}
ALONE = ("keep", "recheck")
TIMED = 50  # all sides generate every TIMED-th text


def openings(path: Path, count: int) -> list[str]:
    """Beginnings of stories spread over a file, 30 to 107 characters up to the end of a word."""
    texts = [line for line in path.read_text().split("\n") if len(line) > 200]
    step = len(texts) / count
    return [texts[int(i * step)][: 30 + 7 * (i % 12)].rsplit(" ", 1)[0] for i in range(count)]


class Expected:
    """The texts of `model.generate`, kept in a file where one is given: a list of tokens per line."""

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


def left(target: DecoderTarget, prompt: Tensor, text: Sequence[int]) -> tuple[dict[str, bool], int]:
    """Whether each way differs from a text, by one pass over it; and how many of its tokens are near-ties."""
    target.reserve(1, len(prompt) + len(text) + 1)
    try:
        target.prefill([Prompt(prompt)])
        logits = target.score([DraftTree.chain(int(prompt[-1]), text[:-1])]).logits[0]
    finally:
        target.cache = None
    best, token = logits.max(-1)
    near = (logits >= best[:, None] - 2 * target.noise).sum(-1) > 1
    other = token != torch.tensor(text)
    return {"keep": bool(other.any()), "recheck": bool((other & ~near).any())}, int(near.sum())


def compared(name: str, prompts: Sequence[str], tokens: int, dtype: str, file: Path | None, whole: bool) -> Any:
    """The figures of one model."""
    model, tokenizer = load(name, dtype)
    sides = {side: truedraft.accelerate(model, tokenizer, **given) for side, given in SIDES.items()}
    encoded = [tokenizer(p, return_tensors="pt", return_token_type_ids=False).input_ids for p in prompts]
    target = sides["keep"].target
    same_bits = isinstance(target.runner, CompiledPass)

    def written(generate: Any, ids: Tensor) -> list[int]:
        return generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    expected = Expected(file, lambda i: written(model.generate, encoded[i]))
    if whole:
        encoded = encoded[: len(expected.texts)]
    differ: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    near = chosen = timed = 0
    for i, ids in enumerate(encoded):
        found = None
        if same_bits:
            found, close = left(target, ids[0], expected(i))
            near, chosen = near + close, chosen + len(expected(i))
        if not same_bits or i % TIMED == 0:
            texts = {}
            for side in SIDES if i % TIMED == 0 else ALONE:
                began = time.process_time()
                texts[side] = written(sides[side].generate, ids)
                seconds[side] += (i % TIMED == 0) * (time.process_time() - began)
            generated = {side: texts[side] != expected(i) for side in ALONE}
            assert found in (None, generated), f"text {i}: one pass gives {found}, generated are {generated}"
            found = generated
        if not same_bits:
            report = sides["keep"].report()
            near, chosen = near + round((report.near_ties or 0.0) * report.tokens), chosen + report.tokens
        if i % TIMED == 0:
            began = time.process_time()
            assert written(model.generate, ids) == expected(i), "model.generate does not repeat itself"
            seconds["model.generate"] += time.process_time() - began
            timed += 1
            assert not same_bits or all(texts[s] == texts[f"{s}, drafts"] for s in ALONE), f"drafts changed text {i}"
        assert found is not None
        differ.update(side for side in ALONE if found[side])
    return {
        "model": Path(name).name, "dtype": dtype, "runtime": target.runtime, "texts": len(encoded), "tokens": tokens,
        "noise": target.noise, "near_ties": round(near / chosen, 4), "differ": {s: differ[s] for s in ALONE},
        "differ_per_1000": {s: round(1000 * differ[s] / len(encoded), 1) for s in ALONE}, "timed": timed,
        "times_of_model.generate": {s: round(t / seconds["model.generate"], 3) for s, t in seconds.items()},
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--expected", type=Path, help="a folder")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    prompts = openings(arguments.stories, arguments.texts or 1000)
    found: list[dict[str, Any]] = []
    for name in arguments.models:
        file = arguments.expected and arguments.expected / f"ref-{Path(name).name}.jsonl"
        found.append(compared(name, prompts, arguments.tokens, arguments.dtype, file, not arguments.texts))
        print(json.dumps(found[-1], indent=1), flush=True)
        if arguments.out:
            write_whole(arguments.out, json.dumps({"machine": machine(), "models": found}, indent=1))
