"""Captured CUDA graphs against the model's own forward on a GPU, by width, and both against its read bandwidth.

    python benchmarks/gpu.py                      # a random Llama of 6.7 B parameters in bf16, 14 GB on the device
    python benchmarks/gpu.py --size 1B --json OUT

Then the engine's time per pass of `generate`: everything outside of the target, drafting included.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import truedraft
from truedraft.bench.roofline import Gauge, measure_passes, roofline
from truedraft.targets.decoder import DecoderTarget

SIZES = {
    "7B": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
    "1B": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
               num_key_value_heads=4),
}  # fmt: skip


def random_model(size: str, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = LlamaConfig(vocab_size=32000, max_position_embeddings=8192, **SIZES[size])
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def engine_seconds(model: PreTrainedModel, sample: bool) -> tuple[float, float]:
    """Seconds per pass outside of the target, and tokens per pass, of a call whose graphs were captured before."""
    fast = truedraft.accelerate(model, control="fixed")
    ids = torch.arange(256, device="cuda")[None] % 97
    for _ in range(2):
        fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=sample, pad_token_id=0)
    report = fast.report()
    return report.engine_seconds_per_pass, report.mean_acceptance_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7B")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--context", type=int, default=256, help="positions of context of the timed passes")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA GPU that torch can use, and there is none on this machine")
    dtype = getattr(torch, args.dtype)
    gauge = Gauge("cuda", dtype)
    model = random_model(args.size, dtype)
    targets = [DecoderTarget(model), DecoderTarget(model, "stock")]
    captured, stock = measure_passes(targets, args.context, args.widths, args.rounds, gauge)
    machine = gauge.machine()
    table = Table(
        title=f"{args.size} {args.dtype} by {targets[0].runtime} on {torch.cuda.get_device_name()}, which reads "
        f"{machine.bandwidth / 1e9:.0f} GB/s and does {machine.rate / 1e12:.0f} TFLOP/s"
    )
    for column in ("width", "floor", "bound by", "captured", "of width 1", "attained", "transformers", "gain"):
        table.add_column(column, justify="right")
    results = []
    for row in roofline(targets[0], machine, captured, args.context):
        table.add_row(
            str(row.width), f"{row.floor * 1e3:.2f} ms", row.bound, f"{row.seconds * 1e3:.2f} ms",
            f"{row.seconds / captured[args.widths[0]]:.2f}x", f"{row.attained:.0%}",
            f"{stock[row.width] * 1e3:.2f} ms", f"{stock[row.width] / row.seconds:.2f}x",
        )  # fmt: skip
        results.append({"model": args.size, "dtype": args.dtype, **asdict(row), "transformers": stock[row.width]})
    console = Console(width=140)
    console.print(table)
    for rule, sample in (("greedy", False), ("seeded", True)):
        seconds, tokens = engine_seconds(model, sample)
        console.print(f"{rule}: the engine adds {seconds * 1e6:.0f} us to a pass, at {tokens:.2f} tokens per pass")
        results.append({"model": args.size, "dtype": args.dtype, "rule": rule, "engine_seconds": seconds})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
