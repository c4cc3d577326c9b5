"""A roofline of passes: the least time of a pass on this machine by width, and the measured time.

A pass reads every weight once, whatever its width, and multiplies it by every node: its floor is the larger of bytes
over read bandwidth and operations over multiply rate. Verification is free while reading takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from truedraft.runtime import native
from truedraft.runtime.native import Form
from truedraft.runtime.weights import stored
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Prompt

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
STEPS = 1 << 20  # of multiply-adds in a sample


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes per second read from memory; rate: operations per second."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class RooflinePoint:
    """The cost of a pass over `width` nodes: floor and median seconds; `bound` names the larger of the two floors."""

    width: int
    floor: float
    seconds: float
    bound: str

    @property
    def attained(self) -> float:
        """Floor over measured time; 1 at best, apart from noise."""
        return self.floor / self.seconds


class Gauge:
    """Memory bandwidth and multiply rate, sampled in turns with passes, so that the same disturbances affect both.

    Read bandwidth is that of a sum over 256 MB (4 GB on a GPU). The rate is that of the best multiply-add instruction
    for weights of `dtype` with its operands in registers, and where there is no compiled code that of a square product.
    """

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32):
        numbers, side = (1 << 30, 8192) if device == "cuda" else (64 << 20, 1024)
        self._large = torch.ones(numbers, device=device)
        self._square = torch.ones(side, side, device=device, dtype=dtype)
        self._library = native.library() if device == "cpu" else None
        self._form = Form.BF16 if dtype == torch.bfloat16 else Form.FLOAT
        self._settle = torch.cuda.synchronize if device == "cuda" else int
        self._reading: list[float] = []
        self._multiplying: list[float] = []
        self.sample()
        self._reading.clear()  # the first sample includes page faults
        self._multiplying.clear()

    def sample(self) -> None:
        self._reading.append(self._large.nbytes / timed(lambda: (self._large.sum(), self._settle())))
        start = time.perf_counter()
        operations = self._multiply()
        self._multiplying.append(operations / (time.perf_counter() - start))

    def _multiply(self) -> int:
        """Multiply for some milliseconds; the operations done."""
        if self._library is not None:
            return self._library.truedraft_multiply(self._form, STEPS, torch.get_num_threads())
        self._square @ self._square
        self._settle()
        return 2 * len(self._square) ** 3

    def machine(self) -> Machine:
        """Medians of the samples; at least one is required."""
        return Machine(median(self._reading), median(self._multiplying))


def measure_passes(
    targets: Sequence[Target],
    context: int = 256,
    widths: Sequence[int] = WIDTHS,
    rounds: int = 9,
    gauge: Gauge | None = None,
) -> list[dict[int, float]]:
    """Median seconds of a pass by width after `context` positions, for each target; targets and gauge take turns."""
    times: list[dict[int, list[float]]] = [{w: [] for w in widths} for _ in targets]
    for target in targets:
        target.reserve(1, context + max(widths))
        target.prefill([Prompt(torch.arange(context, device=target.device) % target.vocabulary)])
    for turn in range(rounds + 1):
        if gauge is not None and turn:
            gauge.sample()
        for width in widths:
            tree = DraftTree.chain(0, [i % target.vocabulary for i in range(1, width)])
            for target, kept in zip(targets, times, strict=True):
                seconds = timed(lambda target=target, tree=tree: (target.score([tree]), target.wait()))  # type: ignore
                if turn:  # the first round warms up
                    kept[width].append(seconds)
    for target in targets:
        target.free()
    return [{w: median(t) for w, t in kept.items()} for kept in times]


def roofline(target: Target, machine: Machine, seconds: dict[int, float], context: int = 256) -> list[RooflinePoint]:
    """The floor of a pass and its measured time, at each measured width."""
    model, c = target.model, target.model.config.get_text_config(decoder=True)
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    tied = model.get_output_embeddings().weight is table
    read = [p for p in model.parameters() if tied or p is not table]
    weights = sum(p.numel() for p in read)
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv = 2 * c.num_hidden_layers * context * heads * size
    bytes_read = sum(map(stored, read)) + kv * target.dtype.itemsize
    attention = 4 * c.num_hidden_layers * context * c.num_attention_heads * size
    rows = []
    for width, taken in seconds.items():
        reading, multiplying = bytes_read / machine.bandwidth, width * (2 * weights + attention) / machine.rate
        rows.append(
            RooflinePoint(
                width, max(reading, multiplying), taken, "reading" if reading >= multiplying else "multiplying"
            )
        )
    return rows


def timed(f: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
