"""dParallel on a small diffusion model: steps, agreement and quality before and after its training.

    truedraft train dparallel --target nano-diffusion --data PROMPTS --out RUN --minutes 5
    python benchmarks/dparallel.py RUN --prompts HELD_OUT [--model nano-diffusion] [--json FILE]

Each model decodes the prompts step by step and under `lossy/dparallel` at its published threshold. Agreement is the
share of new tokens that are those of the original model's step-by-step decoding, at the same place; the loss is that
under `nano`, in nats per token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import truedraft
from canvas import loss_of
from truedraft.cli._models import machine
from truedraft.files import read_lines, write_whole
from truedraft.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the trained model's folder")
    parser.add_argument("--prompts", type=Path, required=True, help="a line each, none of the training")
    parser.add_argument("--model", default="nano-diffusion")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    judge, prompts = load("nano")[0], read_lines(args.prompts)
    expected: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    for name, source in (("original", args.model), ("trained", args.run)):
        model, tokenizer = load(source)
        for rule in (None, "lossy/dparallel"):
            fast: Any = truedraft.accelerate(model, tokenizer, draft=None, rule=rule)
            passes, texts, loss, scored = 0, [], 0.0, 0
            for prompt in prompts:
                ids = tokenizer(prompt, return_tensors="pt").input_ids
                out = fast.generate(ids, max_new_tokens=args.new)[0].tolist()
                summed, count = loss_of(judge, out, ids.shape[1])
                texts.append(out[ids.shape[1] :])
                passes, loss, scored = passes + len(fast.report().passes), loss + summed, scored + count
            expected = expected or texts
            pairs = [pair for one, other in zip(expected, texts, strict=True) for pair in zip(one, other, strict=False)]
            same = sum(a == b for a, b in pairs)
            rows.append({
                "model": name, "rule": rule or "low-confidence", "steps": passes, "tokens": sum(map(len, texts)),
                "steps_per_token": round(passes / sum(map(len, texts)), 3),
                "agreement": round(same / sum(map(len, expected)), 3), "loss": round(loss / scored, 3),
            })  # fmt: skip
            print(rows[-1], flush=True)
    if args.json:
        write_whole(args.json, json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
