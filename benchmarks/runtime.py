"""The compiled pass against the model's own forward, by width, and both against the limits of this machine.

    python benchmarks/runtime.py                  # random Llamas of 0.1 B and 0.5 B parameters, fp32 and bf16
    python benchmarks/runtime.py --weights int8 int4    # quantised, in bf16 models; int8-float32: in one of fp32
    python benchmarks/runtime.py MODEL --json OUT --svg PICTURE

Targets take turns within one run; figures are medians. Read the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from truedraft.bench.plots import Panel, picture
from truedraft.bench.roofline import WIDTHS, Gauge, measure_passes, roofline
from truedraft.files import write_whole
from truedraft.runtime.quantize import quantize
from truedraft.targets.decoder import DecoderTarget

SIZES = {
    "0.1 B": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                  num_key_value_heads=4),
    "0.5 B": dict(hidden_size=1024, intermediate_size=3584, num_hidden_layers=30, num_attention_heads=16,
                  num_key_value_heads=8),
}  # fmt: skip


LINES = {"floor": "floor", "compiled": "seconds", "transformers": "transformers"}


def quantised(model: PreTrainedModel, kind: str, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of it in a dtype, with quantised weights."""
    copied = copy.deepcopy(model).to(dtype)
    quantize(copied, kind)
    return copied


WEIGHTS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "float32": lambda model: model.float(),
    "bfloat16": lambda model: model.bfloat16(),
    "int8": partial(quantised, kind="int8", dtype=torch.bfloat16),
    "int4": partial(quantised, kind="int4", dtype=torch.bfloat16),
    "int8-float32": partial(quantised, kind="int8", dtype=torch.float32),
    "int4-float32": partial(quantised, kind="int4", dtype=torch.float32),
}


def models(path: str | None) -> list[tuple[str, PreTrainedModel]]:
    if path:
        return [(path, AutoModelForCausalLM.from_pretrained(path).eval())]
    torch.manual_seed(0)
    made = []
    for name, shape in SIZES.items():
        config = LlamaConfig(vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=True, **shape)
        made.append((name, LlamaForCausalLM(config).eval()))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model of transformers; by default random ones")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--context", type=int, default=256, help="positions of context of the timed passes")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--weights", nargs="+", choices=[*WEIGHTS], default=["float32", "bfloat16"])
    parser.add_argument("--machine", default="", help="a description of this machine, for --json")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path, help="draw the milliseconds by width")
    args = parser.parse_args()
    console, results, measured = Console(width=120), [], []
    panels: list[Panel] = []
    for name, loaded in models(args.model):
        for kept in args.weights:
            model = WEIGHTS[kept](loaded)
            gauge, targets = Gauge(dtype=model.dtype), [DecoderTarget(model), DecoderTarget(model, "stock")]
            compiled, stock = measure_passes(targets, args.context, args.widths, args.rounds, gauge)
            machine = gauge.machine()
            table = Table(
                title=f"{name} {kept}, by {targets[0].runtime}; this machine reads {machine.bandwidth / 1e9:.0f} GB/s "
                f"and does {machine.rate / 1e9:.0f} GFLOP/s"
            )
            for column in ("width", "floor", "bound by", "compiled", "of width 1", "attained", "transformers", "gain"):
                table.add_column(column, justify="right")
            for row in roofline(targets[0], machine, compiled, args.context):
                gain = stock[row.width] / row.seconds
                table.add_row(
                    str(row.width), f"{row.floor * 1e3:.1f} ms", row.bound, f"{row.seconds * 1e3:.1f} ms",
                    f"{row.seconds / compiled[args.widths[0]]:.2f}x", f"{row.attained:.0%}",
                    f"{stock[row.width] * 1e3:.1f} ms", f"{gain:.2f}x",
                )  # fmt: skip
                results.append({"model": name, "weights": kept, **asdict(row), "transformers": stock[row.width]})
            measured.append({"model": name, "weights": kept, **asdict(machine)})
            console.print(table)
            last = results[-len(args.widths) :]
            lines = [(label, [1e3 * row[key] for row in last]) for label, key in LINES.items()]
            panels.append(
                Panel(f"{name}, {kept}: ms by width", lines, list(map(str, args.widths)), value="{:.0f}".format)
            )
    if args.json:
        report = {"machine": args.machine, "context": args.context, "limits": measured, "results": results}
        write_whole(args.json, json.dumps(report, indent=1) + "\n")
    if args.svg:
        write_whole(args.svg, picture(panels, "nodes in a pass"))


if __name__ == "__main__":
    main()
