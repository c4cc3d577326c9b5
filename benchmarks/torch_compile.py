"""`torch.compile` of the model's forward at static widths, against the compiled pass and the plain forward.

    python benchmarks/torch_compile.py                  # random Llamas of 0.1 B and 0.5 B parameters, fp32 and bf16

Each width is compiled for itself over a static cache (`fullgraph`, frozen weights); seconds of compiling are shown
with the time of a pass afterwards, medians in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, StaticCache

from runtime import WEIGHTS, models
from truedraft.bench.roofline import timed
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree, Prompt

CONTEXT = 256


def forward(model: PreTrainedModel, width: int) -> Callable[[], object]:
    """A function that scores `width` tokens after CONTEXT positions of a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + 64)
    with torch.no_grad():
        model(torch.arange(CONTEXT)[None], past_key_values=cache)
    ids, positions = torch.arange(width)[None], CONTEXT + torch.arange(width)[None]

    def run() -> object:
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT) if hasattr(layer, "cumulative_length") else None
        with torch.no_grad():
            return model(ids, position_ids=positions, past_key_values=cache).logits

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--weights", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    args = parser.parse_args()
    torch._inductor.config.freezing = True
    console = Console(width=120)
    for name, loaded in models(None):
        for kept in args.weights:
            model = WEIGHTS[kept](loaded)
            target = DecoderTarget(model)
            target.reserve(1, CONTEXT + 64)
            target.prefill([Prompt(torch.arange(CONTEXT))])
            table = Table(title=f"{name} {kept}, {CONTEXT} positions")
            for column in ("width", "forward", "torch.compile", "to compile", "compiled pass"):
                table.add_column(column, justify="right")
            for width in args.widths:
                torch._dynamo.reset()
                plain = forward(model, width)
                whole = torch.compile(plain, dynamic=False)
                compiling = timed(whole)
                tree = DraftTree.chain(0, list(range(1, width)))
                sides: list[Callable[[], object]] = [plain, whole, lambda tree=tree: target.score([tree])]  # type: ignore[misc]
                times: list[list[float]] = [[] for _ in sides]
                for _ in range(args.rounds + 1):
                    for side, spent in zip(sides, times, strict=True):
                        start = time.perf_counter()
                        side()
                        spent.append(time.perf_counter() - start)
                cells = [f"{median(spent[1:]) * 1e3:.1f} ms" for spent in times]
                table.add_row(str(width), cells[0], cells[1], f"{compiling:.0f} s", cells[2])
            target.cache = None
            console.print(table)


if __name__ == "__main__":
    main()
