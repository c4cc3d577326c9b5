"""Shapes of drafts from one draft model: tokens per pass and speed of each, and pictures of the trees.

    python benchmarks/trees.py [--pairs TARGET DRAFT ...] [--stretched SIZE] [--dtype bfloat16] [--counts] --json FILE

Every method decodes the same prompts greedily, in rounds, with drafts in full and under cost control. Speeds are
medians of ratios to truedraft without drafts, on the same prompt in the same round. `theory` is the speed if nothing
but the passes of both models took time; `level_ms` is what drafting takes beside these, per pass of the draft model.
`--stretched` makes the target larger, with the same text (`bench/stretched.py`), in a dtype. `--counts` leaves out all
that depends on time, for machines that do other work: rows of drafts in full, without their speeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

import truedraft
from stories import beginnings
from truedraft.bench.sizes import size_of
from truedraft.bench.stretched import stretched
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load
from truedraft.tree import DraftTree

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
PAIRS = [(str(WEIGHTS / "bitllama_3M"), str(WEIGHTS / "stories260K")), ("nano", "nano-draft")]
METHODS = (
    "draft-model", "draft-model:length=4", "draft-model:length=12", "opt-tree", "specexec", "dyspec", "sequoia", "cape",
    "gumbel-top-k", "cs-drafting",
)  # fmt: skip
CONTROLS = ("fixed", "cost")
COUNTED = ("target", "draft", "way", "exact", "tokens_per_pass")
PASSES = ("extend_tapped", "extend_greedily", "extend_trees", "score", "prefill")  # of a draft model's target
X, Y = 46, 44  # of a picture: from node to node, and from level to level


class Passes:
    """Counts and times the passes of a draft model."""

    def __init__(self, drafter: Any):
        self.count, self.seconds = 0, 0.0
        inner = getattr(drafter, "distributions", drafter)
        target = inner.reader.target if hasattr(inner, "reader") else None
        for name in PASSES if target is not None else ():
            setattr(target, name, self._timed(getattr(target, name), name))

    def _timed(self, call: Any, name: str) -> Any:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            found = call(*args)
            self.seconds += time.perf_counter() - start
            if name == "extend_greedily" and found:
                self.count += max(map(len, found), default=0)
            else:
                self.count += len(found[1]) if name == "extend_trees" and found else 1
            return found

        return timed


def named(method: str, draft: str) -> str:
    """The method with its draft model."""
    name, _, knobs = method.partition(":")
    return f"{name}:model={draft}" + (f",{knobs}" if knobs else "")


def measured(
    model: Any, tokenizer: Any, names: tuple[str, str], methods: Sequence[str], tokens: int, rounds: int
) -> tuple[list[dict[str, Any]], dict[str, DraftTree]]:
    """A row by method and control, and the largest draft of each method for the first prompt."""
    fast: dict[str, Any] = {"none": truedraft.accelerate(model, tokenizer, draft=None)}
    for method in methods:
        for control in CONTROLS:
            fast[f"{method}, {control}"] = truedraft.accelerate(
                model, tokenizer, draft=named(method, names[1]), control=control
            )
    drafts = {method: _recorded(fast[f"{method}, fixed"].drafter) for method in methods}
    prompts = beginnings(tokenizer, 3)
    plain = [model.generate(ids, max_new_tokens=tokens, do_sample=False) for ids in prompts]
    seconds: dict[str, list[float]] = {name: [] for name in fast}
    exact, passes, drafting = dict.fromkeys(fast, True), dict.fromkeys(fast, 0), dict.fromkeys(fast, 0.0)
    target = dict.fromkeys(fast, 0.0)
    for side in fast.values():
        side.generate(prompts[0], max_new_tokens=8, do_sample=False)
    drafted = {name: Passes(side.drafter) for name, side in fast.items()}
    for _ in range(rounds):
        for ids, expected in zip(prompts, plain, strict=True):
            for name, side in fast.items():
                start = time.perf_counter()
                exact[name] &= torch.equal(side.generate(ids, max_new_tokens=tokens, do_sample=False), expected)
                seconds[name].append(time.perf_counter() - start)
                passes[name] += len(side.report().passes)
                drafting[name] += side.report().seconds["draft"]
                target[name] += side.report().seconds["target"] + side.report().seconds["prefill"]
    count = rounds * sum(one.shape[1] - ids.shape[1] for one, ids in zip(plain, prompts, strict=True))
    rows = [
        {
            "target": names[0], "draft": Path(names[1]).name, "way": name, "exact": exact[name],
            "tokens_per_pass": count / passes[name], "drafting": drafting[name] / sum(seconds[name]),
            "speed": statistics.median(a / b for a, b in zip(seconds["none"], seconds[name], strict=True)),
            "theory": target["none"] / (target[name] + drafted[name].seconds),
            "level_ms": 1e3 * (drafting[name] - drafted[name].seconds) / drafted[name].count
            if drafted[name].count else None,
        }
        for name in fast
    ]  # fmt: skip
    return rows, {method: max(found, key=len) for method, found in drafts.items()}


def _recorded(drafter: Any) -> list[DraftTree]:
    """The list that the drafts of a drafter are added to from now on."""
    found: list[DraftTree] = []
    propose = drafter.propose

    def proposed(rows: Any, budget: Any) -> Any:
        drafts = propose(rows, budget)
        if len(found) < 200:
            found.extend(drafts)
        return drafts

    drafter.propose = proposed
    return found


def picture(drafts: dict[str, DraftTree], tokenizer: Any) -> str:
    """The trees as SVG, one below the other; a node has the text of its token."""
    parts: list[str] = []
    top = width = 0
    for name, tree in drafts.items():
        parts.append(f'<text x="8" y="{top + 20}" class="name">{escape(name)}: {tree.drafted} nodes</text>')
        across = _across(tree)
        at = [(30 + X * x, top + 44 + Y * d) for x, d in zip(across, tree.shape.depth, strict=True)]
        for node, parent in enumerate(tree.parent[1:], 1):
            (x, y), (px, py) = at[node], at[parent]
            parts.append(f'<line x1="{px}" y1="{py + 4}" x2="{x}" y2="{y - 12}"/>')
        for token, (x, y) in zip(tree.tokens, at, strict=True):
            parts.append(f'<text x="{x}" y="{y}">{escape(repr(tokenizer.decode([token]))[1:-1])}</text>')
        width = max(width, *(x for x, _ in at))
        top = max(y for _, y in at) + 24
    style = "text{font:11px monospace;text-anchor:middle}.name{font:bold 13px sans-serif;text-anchor:start}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 40:.0f}" height="{top + 8}">'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}<style>{style}line{{stroke:#888}}</style>{background}{''.join(parts)}</svg>\n"


def _across(tree: DraftTree) -> list[float]:
    """Where nodes are from left to right: leaves side by side, others in the middle of their children."""
    across, leaves = [0.0] * len(tree), 0

    def place(node: int) -> None:
        nonlocal leaves
        children = tree.shape.children[node]
        for child in children:
            place(child)
        if children:
            across[node] = (across[children[0]] + across[children[-1]]) / 2
        else:
            across[node], leaves = leaves, leaves + 1

    place(0)
    return across


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", metavar="MODEL", help="a target and its draft model, and so on")
    parser.add_argument("--stretched", metavar="SIZE", help="such as 0.5B for nano, or LAYERSxHIDDEN")
    parser.add_argument("--dtype", default="float32", help="of a stretched target")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    pairs = list(zip(args.pairs[::2], args.pairs[1::2], strict=True)) if args.pairs else PAIRS
    found: dict[str, Any] = {"machine": machine(), "rows": []}
    for target, draft in pairs:
        model, tokenizer = load(target)
        name = Path(target).name
        if args.stretched:
            layers, hidden = size_of(args.stretched, name)
            larger = stretched(model.to(getattr(torch, args.dtype)), layers=layers, hidden=hidden)
            model, name = larger, f"{name}, {args.stretched}, {args.dtype}"
        rows, drafts = measured(model, tokenizer, (name, draft), args.methods, args.tokens, args.rounds)
        if args.counts:
            rows = [{name: row[name] for name in COUNTED} for row in rows if "cost" not in row["way"]]
        found["rows"] += rows
        for row in rows:
            print(row, flush=True)
        if args.svg and (target, draft) == pairs[0]:
            write_whole(args.svg, picture(drafts, tokenizer))
        if args.json:
            write_whole(args.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
