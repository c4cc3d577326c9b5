"""How far products move when activations are rounded: fixed point by blocks, bf16, and llama.cpp's eight bits.

    python benchmarks/activations.py NAME=MODEL.gguf ... [--tokens 256] [--json FILE]

The activations are those of the model itself over a text, at the entry of each of its quantised linear layers. Each is
rounded in each way, and multiplied by the matrix that the file stands for, in fp64, so that nothing but the rounding
counts; the figure is the root of the mean square of the difference over that of the product, by kind of layer and over
all. "fixed point, 24 bits" is how truedraft multiplies where a model computes in fp32, "16 bits" where it computes in
bf16; there the activations are bf16 numbers to begin with. A power of two is shared by 32 columns, or by 256 for
k-quants on processors with AMX. llama.cpp rounds to eight bits with a scale for 256 columns (k-quants) or for 32 (the
others).
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import truedraft
from truedraft.runtime.packed import PackedTensor

TEXT = Path(__file__).parents[1] / "LICENSE"
LAYERS = 6  # that are looked at, spread over the depth


def fixed(x: Tensor, bits: int, columns: int = 32) -> Tensor:
    """Integers of so many bits times a power of two for each block."""
    blocks = x.unflatten(-1, (-1, columns))
    most = blocks.abs().amax(-1, keepdim=True) * 1.00396
    step = torch.exp2(torch.floor(torch.log2(most.clamp_min(1e-30))) + 2 - bits)
    return (torch.round(blocks / step) * step).flatten(-2)


def scaled(x: Tensor, columns: int) -> Tensor:
    """Integers of eight bits times the largest number of each block / 127."""
    blocks = x.unflatten(-1, (-1, columns))
    step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (torch.round(blocks / step) * step).flatten(-2)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda x: x.float().double(),
    "fixed point, 24 bits": lambda x: fixed(x, 24),
    "fixed point, 16 bits": lambda x: fixed(x, 16),
    "bf16": lambda x: x.bfloat16().double(),
    "bf16, then fixed point, 16 bits": lambda x: fixed(x.bfloat16().double(), 16),
    "fixed point, 24 bits, by 256 columns": lambda x: fixed(x, 24, 256),
    "fixed point, 16 bits, by 256 columns": lambda x: fixed(x, 16, 256),
    "8 bits by 32 columns (llama.cpp)": lambda x: scaled(x, 32),
    "8 bits by 256 columns (llama.cpp)": lambda x: scaled(x, 256),
}


def errors_of(x: Tensor, matrix: Tensor) -> dict[str, tuple[float, float]]:
    """By way: the sums of squares of the difference, and of the product."""
    x, matrix = x.double(), matrix.double()
    whole, found = x @ matrix.T, {}
    for way, rounded in WAYS.items():
        if "256" in way and x.shape[1] % 256:
            continue
        found[way] = float(((rounded(x) - x) @ matrix.T).square().sum()), float(whole.square().sum())
    return found


def measured(file: str, tokens: int) -> dict[str, dict[str, float]]:
    """The errors of a model, by kind of layer and way."""
    model: Any
    model, tokenizer = truedraft.load(file, dtype="float32")
    totals: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))

    def noted(name: str, layer: nn.Linear) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            matrix: Any = layer.weight.detach()
            for way, sums in errors_of(given[0].flatten(0, -2), matrix.dequantize()).items():
                for kind in (name.rpartition(".")[2], "all"):
                    total = totals[kind][way]
                    total[0], total[1] = total[0] + sums[0], total[1] + sums[1]

        return hook

    depth = model.config.num_hidden_layers
    looked = {f".{round(i * (depth - 1) / (LAYERS - 1))}." for i in range(LAYERS)}
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "weight", None), PackedTensor) and any(part in name for part in looked):
            layer.register_forward_hook(noted(name, layer))
    ids = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :tokens]
    with torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    return {kind: {way: (e / p) ** 0.5 for way, (e, p) in ways.items()} for kind, ways in totals.items()}


def shown(name: str, found: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"{name}: error over the product, root mean squares")
    table.add_column("activations")
    for kind in found:
        table.add_column(kind, justify="right")
    for way in WAYS:
        table.add_row(way, *(f"{ways[way]:.1e}" if way in ways else "" for ways in found.values()))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL.gguf")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    results = []
    for name, _, file in (model.partition("=") for model in args.models):
        results.append({"model": name, "tokens": args.tokens, "errors": measured(file, args.tokens)})
        shown(name, results[-1]["errors"])
        if args.json is not None:
            args.json.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
