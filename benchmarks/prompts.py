"""Time to first token of long prompts: plain `transformers` against truedraft, with drafts and without.

    python benchmarks/prompts.py [--lengths 512 4096 16384] [--rounds 5] [--json benchmarks/results/prompts.json]

`generate` with `max_new_tokens=1` on random Llamas, the sides in turns within one process and starting with another one
each round; ratios are taken round by round, and figures are medians. `--cpu` measures the process's time on one core
instead of wall time, for machines with other load.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import truedraft

SIZES: dict[str, dict[str, Any]] = {
    "0.1 B": dict(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=32000,
    ),
    "1 M": dict(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=2000,
    ),
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def made(size: str, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=32768, tie_word_embeddings=True, **SIZES[size])
    model = LlamaForCausalLM(config).eval().to(dtype)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def compared(
    model: PreTrainedModel, ids: torch.Tensor, rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds to the first token by side, round by round; every side gives plain decoding's token."""
    undrafted, auto = truedraft.accelerate(model, draft=None), truedraft.accelerate(model)
    sides: dict[str, Any] = {"transformers": model.generate, "no drafts": undrafted.generate, "auto": auto.generate}
    settings = dict(max_new_tokens=1, do_sample=False, attention_mask=torch.ones_like(ids))
    auto.generate(ids[:, :16], max_new_tokens=1, do_sample=False)  # measures the costs of passes, once per machine
    taken: dict[str, list[float]] = {name: [] for name in sides}
    tokens: set[int] = set()
    for turn in range(rounds + 1):
        order = list(sides)[turn % len(sides) :] + list(sides)[: turn % len(sides)]
        for name in order:
            auto.forget()  # every round has the same prompt
            start = clock()
            tokens.add(int(sides[name](ids, **settings)[0, -1]))
            if turn:  # the first one warms up
                taken[name].append(clock() - start)
    if len(tokens) > 1:
        raise SystemExit(f"different first tokens: {sorted(tokens)}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="time on the cores, not by the clock")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock = time.process_time if args.cpu else time.perf_counter
    if args.cpu:
        torch.set_num_threads(1)  # threads that wait would be counted
    table = Table(title="seconds to the first token, and times those of transformers")
    for column in ("model", "dtype", "prompt", "transformers", "no drafts", "ratio", "auto", "ratio"):
        table.add_column(column, justify="right")
    results = []
    for size in args.sizes:
        for dtype in args.dtypes:
            model = made(size, DTYPES[dtype])
            for length in args.lengths:
                ids = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
                taken = compared(model, ids, args.rounds, clock)
                seconds = {name: statistics.median(times) for name, times in taken.items()}
                ratios = {
                    name: statistics.median(a / b for a, b in zip(times, taken["transformers"], strict=True))
                    for name, times in taken.items()
                }
                results.append(
                    {"model": size, "dtype": dtype, "prompt": length, "seconds": seconds, "ratios": ratios,
                     "rounds": taken}
                )  # fmt: skip
                figures = [f(n) for n in taken for f in (lambda n: f"{seconds[n]:.3f}", lambda n: f"{ratios[n]:.3f}")]
                table.add_row(size, dtype, f"{length:,}", figures[0], *figures[2:])
                print(json.dumps(results[-1]), flush=True)
                if args.json:
                    args.json.parent.mkdir(parents=True, exist_ok=True)
                    args.json.write_text(json.dumps({"machine": machine(args.cpu), "results": results}, indent=1))
    Console(width=120).print(table)


def machine(cpu: bool) -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__,
        "clock": "time on the cores" if cpu else "wall clock",
    }  # fmt: skip


if __name__ == "__main__":
    main()
