"""Canvases of diffusion models: passes and speed of exact and lossy decoding, and the quality of the lossy ones.

    python benchmarks/canvas.py [--model nano-diffusion] [--sizes as-is 0.1B] --json FILE
    python benchmarks/canvas.py --views --json FILE

All methods decode one prompt in turn, then the next, in rounds; speeds are medians of ratios to the reference, the same
model with one canvas per pass, on the same prompt in the same round. Exact text is compared with it. Agreement of a
lossy text is the share of its tokens that are the reference's at the same place; its
loss is the mean over its tokens of their negative log-probability under `nano`, in nats, beside that of the reference's
text. `nano` is also the guide of policies that need one. With `--views` the model attends to the whole canvas, and
passes are made under each view; the positions that passes compute are given per token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import truedraft
from truedraft import assets, registry
from truedraft.bench import stretched
from truedraft.bench.sizes import size_of
from truedraft.canvas.layout import layout_of
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

EXACT = ("freedave", "freedave:canvases=8", "ssd", "ssd:canvases=8", "lattice:canvases=8", "lattice")
TOKENS = {"story": 160, "edit": 320}
AGAINST = {"left-to-right": "left-to-right", "lossy/dkv-cache-greedy": "left-to-right"}  # else the reference
AS_IS = "as-is"


def prompts(few: int) -> dict[str, list[str]]:
    """The embedded prompts by kind."""
    stories = [assets.prompt("story.txt"), *assets.prompt("stories.txt").split("\n\n")]
    edits = [
        assets.edit_prompt(assets.prompt("edit.py.txt"), instruction)
        for instruction in assets.prompt("edit_instructions.txt").split("\n")
    ]
    return {"story": stories[:few], "edit": edits[:few]}


def loss_of(judge: Any, ids: list[int], start: int) -> tuple[float, int]:
    """Summed negative log-probability of the tokens from `start` on under another model, and their number."""
    with torch.no_grad():
        logits = judge(torch.tensor([ids])).logits[0, start - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum")), len(
        ids
    ) - start


def measured(model: Any, tokenizer: Any, few: int, rounds: int, every: bool) -> list[dict[str, Any]]:
    """A row by method and kind of prompt; without `every` those of exact methods under cost control, and fast-dllm."""
    judge = load("nano")[0]
    sides: dict[str, Any] = {"reference": truedraft.accelerate(model, tokenizer, draft=None)}
    for draft in EXACT if every else ():
        sides[draft] = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
    for name in registry.names("canvas.speculators"):
        sides[f"{name}, cost"] = truedraft.accelerate(model, tokenizer, draft=name)
    kind = "canvas.policies.lossy"
    for name in (*registry.names(kind), *registry.presets(kind)) if every else ("fast-dllm",):
        needs = registry.method(kind, registry.presets(kind).get(name, (name, {}))[0]).card.needs
        if "training" not in needs:
            rule = registry.load(kind, name, **({"model": judge} if "guide" in needs else {}))
            sides[f"lossy/{name}"] = truedraft.accelerate(model, tokenizer, rule=rule)
    return compared(sides, tokenizer, prompts(few), rounds)


def viewed(model: Any, tokenizer: Any, few: int, rounds: int) -> list[dict[str, Any]]:
    """A row by view on stories, with attention to the whole canvas."""
    layout = layout_of(model.config, tokenizer)
    assert layout is not None
    whole = partial(truedraft.accelerate, model, tokenizer, draft=None, layout=replace(layout, attention="whole"))
    sides = {"reference": whole(), **{rule: whole(rule=rule) for rule in ("left-to-right", "lossy/fast-dllm")}}
    for name in (*registry.names("canvas.views"), *registry.presets("canvas.views")):
        rule = AGAINST.get(f"lossy/{name}")
        sides[f"lossy/{name}"] = whole(view=f"lossy/{name}", rule=rule)
        if rule is None:
            sides[f"lossy/{name}, lossy/fast-dllm"] = whole(view=f"lossy/{name}", rule="lossy/fast-dllm")
    return compared(sides, tokenizer, {"story": prompts(few)["story"]}, rounds)


def compared(
    sides: dict[str, Any], tokenizer: Any, subjects: dict[str, list[str]], rounds: int
) -> list[dict[str, Any]]:
    """A row by method and kind of prompt."""
    judge, rows = load("nano")[0], []
    for subject, texts in subjects.items():
        inputs = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
        results: dict[str, Any] = {
            name: {"seconds": [], "texts": [], "passes": 0, "tokens": 0, "positions": 0} for name in sides
        }
        for turn in range(rounds):
            for ids in inputs:
                for name, side in sides.items():
                    start = time.perf_counter()
                    out = side.generate(ids, max_new_tokens=TOKENS[subject])[0].tolist()
                    results[name]["seconds"].append(time.perf_counter() - start)
                    if turn == 0:
                        results[name]["texts"].append(out)
                        results[name]["passes"] += len(side.report().passes)
                        results[name]["tokens"] += side.report().tokens
                        results[name]["positions"] += sum(one.width for one in side.report().passes)
        for name, found in results.items():
            reference = results[AGAINST.get(name, "reference")]
            pairs = list(zip(reference["texts"], found["texts"], inputs, strict=True))
            losses = [loss_of(judge, text, ids.shape[1]) for _, text, ids in pairs]
            same = sum(
                a == b
                for one, other, ids in pairs
                for a, b in zip(one[ids.shape[1] :], other[ids.shape[1] :], strict=False)
            )
            speed = statistics.median(a / b for a, b in zip(reference["seconds"], found["seconds"], strict=True))
            rows.append({
                "method": name, "prompts": subject, "passes": found["passes"],
                "fewer_passes": reference["passes"] / found["passes"],
                "positions_per_token": found["positions"] / max(found["tokens"], 1),
                "tokens_per_pass": found["tokens"] / found["passes"],
                "speed": speed, "speed_per_token": speed * found["tokens"] / max(reference["tokens"], 1),
                "same_text": all(one == other for one, other, _ in pairs),
                "agreement": same / max(sum(len(one) - ids.shape[1] for one, _, ids in pairs), 1),
                "loss": sum(loss for loss, _ in losses) / max(sum(count for _, count in losses), 1),
            })  # fmt: skip
            print(rows[-1], flush=True)
            assert name.startswith("lossy/") or rows[-1]["same_text"], f"{name}: another text"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano-diffusion")
    parser.add_argument("--sizes", nargs="+", default=[AS_IS, "0.1B"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the stretched sizes")
    parser.add_argument("--few", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--views", action="store_true", help="views alone, with attention to the whole canvas")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "model": args.model, "sizes": {}}
    if args.views:
        found["views"] = viewed(*load(args.model), args.few, args.rounds)
        _save(found, args.json)
    for size in () if args.views else args.sizes:
        for dtype in ["float32"] if size == AS_IS else args.dtypes:
            model, tokenizer = load(args.model)
            if size != AS_IS:
                layers, hidden = size_of(size, "nano")
                model = stretched.stretched(model, layers=layers, hidden=hidden)
            of_size = measured(model.to(getattr(torch, dtype)), tokenizer, args.few, args.rounds, every=size == AS_IS)
            found["sizes"][f"{size}, {dtype}"] = of_size
            _save(found, args.json)


def _save(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write_whole(path, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
