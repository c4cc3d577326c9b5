"""Short calls whose drafts do not pay: what the cost control costs beside no drafts.

    python benchmarks/short_calls.py [--processes N] [--calls N] --json FILE

Each process begins without stored times of passes, so that it measures them, and makes four calls before those that are
timed. Calls with drafts under the cost control, calls without drafts, and a second such side as a control alternate in
random order, on the same prompts. Of each process: the median of the ratios without drafts to with drafts, and the
ratio of the sums.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import truedraft
from stories import beginnings
from truedraft.cli._models import machine
from truedraft.files import write_whole
from truedraft.loading import load

WEIGHTS = Path(__file__).resolve().parents[2] / "shared" / "weights"
PAIRS = [
    (str(WEIGHTS / "bitllama_3M"), str(WEIGHTS / "stories260K"), 100),
    (str(WEIGHTS / "bitllama_3M"), str(WEIGHTS / "babyllama_tok105"), 100),
    ("nano", "nano-draft", 60),
]  # target, draft model, tokens of a call
BEFORE = 4  # calls that are not timed


def measured(target: str, draft: str, tokens: int, calls: int) -> dict[str, Any]:
    """The ratios of this process."""
    model, tokenizer = load(target)
    sides = {
        name: truedraft.accelerate(model, tokenizer, draft=f"draft-model:model={draft}" if name == "drafts" else None)
        for name in ("drafts", "none", "control")
    }
    prompts = beginnings(tokenizer)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(-BEFORE, calls):
        for name in random.sample(list(sides), len(sides)):
            start = time.perf_counter()
            sides[name].generate(prompts[i % len(prompts)], max_new_tokens=tokens, do_sample=False)
            if i >= 0:
                seconds[name].append(time.perf_counter() - start)
    none = seconds["none"]
    return {"milliseconds": 1e3 * statistics.median(none)} | {
        name: {
            "median": statistics.median(a / b for a, b in zip(none, seconds[name], strict=True)),
            "total": sum(none) / sum(seconds[name]),
        }
        for name in ("drafts", "control")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--calls", type=int, default=36)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", nargs=3, metavar=("TARGET", "DRAFT", "TOKENS"), help="measure here")
    args = parser.parse_args()
    if args.process:
        target, draft, tokens = args.process
        print(json.dumps(measured(target, draft, int(tokens), args.calls)))
        return
    found: dict[str, Any] = {"machine": machine(), "rows": []}
    for _ in range(args.processes):
        for target, draft, tokens in PAIRS:
            command = [sys.executable, __file__, "--calls", str(args.calls), "--process", target, draft, str(tokens)]
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"XDG_CACHE_HOME": folder}
                )
            names = {"target": Path(target).name, "draft": Path(draft).name, "tokens": tokens}
            found["rows"].append(names | json.loads(done.stdout))
            print(found["rows"][-1], flush=True)
    if args.json:
        write_whole(args.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
