"""What a pass must cost on this machine, by width, and what it does cost.

A pass reads every weight once, whatever its width, and multiplies it by every node: its floor is the larger of bytes
over read bandwidth and operations over multiply rate. Verification is free as long as reading takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from truedraft.runtime.weights import stored
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import DraftTree, Prompt

WIDTHS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes per second read from memory; rate: operations per second. The best seen of each."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Row:
    """A pass over `width` nodes: floor and median seconds; `bound` says which of the two floors it is."""

    width: int
    floor: float
    seconds: float
    bound: str

    @property
    def attained(self) -> float:
        """Share of what the machine allows, 1 at best."""
        return self.floor / self.seconds


def measure_machine(tries: int = 9, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Machine:
    """Read bandwidth over 256 MB, or 4 GB on a GPU, and the rate of a square product in a dtype."""
    numbers, side = (1 << 30, 8192) if device == "cuda" else (64 << 20, 1024)
    large, square = torch.ones(numbers, device=device), torch.ones(side, side, device=device, dtype=dtype)
    settle = torch.cuda.synchronize if device == "cuda" else int
    bandwidth = max(numbers * 4 / timed(lambda: (large.sum(), settle())) for _ in range(tries))
    rate = max(2 * side**3 / timed(lambda: (square @ square, settle())) for _ in range(tries))
    return Machine(bandwidth, rate)


def measure_passes(
    targets: Sequence[DecoderTarget], context: int = 256, widths: Sequence[int] = WIDTHS, rounds: int = 9
) -> list[dict[int, float]]:
    """Median seconds of a pass by width behind `context` positions, one dict per target; all take turns."""
    times: list[dict[int, list[float]]] = [{w: [] for w in widths} for _ in targets]
    for target in targets:
        target.reserve(1, context + max(widths))
        target.prefill([Prompt(torch.arange(context, device=target.device) % target.vocabulary)])
    for turn in range(rounds + 1):
        for width in widths:
            tree = DraftTree.chain(0, [i % target.vocabulary for i in range(1, width)])
            for target, kept in zip(targets, times, strict=True):
                seconds = timed(lambda target=target, tree=tree: (target.score([tree]), target.wait()))  # type: ignore
                if turn:  # the first round warms up
                    kept[width].append(seconds)
    for target in targets:
        target.cache = None
    return [{w: median(t) for w, t in kept.items()} for kept in times]


def roofline(target: DecoderTarget, machine: Machine, seconds: dict[int, float], context: int = 256) -> list[Row]:
    """The floor of a pass at each measured width, and what was attained of it."""
    model, c = target.model, target.config
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    tied = model.get_output_embeddings().weight is table
    read = [p for p in model.parameters() if tied or p is not table]
    weights = sum(p.numel() for p in read)
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv = 2 * len(target.layer_types) * context * heads * size
    bytes_read = sum(map(stored, read)) + kv * target.dtype.itemsize
    attention = 4 * len(target.layer_types) * context * c.num_attention_heads * size
    rows = []
    for width, taken in seconds.items():
        reading, multiplying = bytes_read / machine.bandwidth, width * (2 * weights + attention) / machine.rate
        rows.append(
            Row(width, max(reading, multiplying), taken, "reading" if reading >= multiplying else "multiplying")
        )
    return rows


def timed(f: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
