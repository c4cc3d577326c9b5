"""A roofline of passes: the least time of a pass on this machine by width, and the measured time.

A pass reads every weight once, whatever its width, and multiplies it by every node: its floor is the larger of bytes
over read bandwidth and operations over multiply rate. Verification is free while reading takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime import native
from truedraft.runtime.linears import Product
from truedraft.runtime.native import Form
from truedraft.runtime.panels import panels
from truedraft.runtime.weights import Weight, stored
from truedraft.targets._base import Target
from truedraft.tree import DraftTree, Prompt

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
STEPS, PIECES = 1 << 20, 16  # of multiply-adds in a sample, and its pieces
ROWS, COLUMNS = 16, 1024  # of what is read; rows are a multiple
READ = 256 << 20  # bytes that a sample of the bandwidth reads, at least; 4 GB on a GPU
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes per second read from memory; rate: operations per second; precision: of what is multiplied."""

    bandwidth: float
    rate: float
    precision: str = "fp32"


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

    Read bandwidth is that of the fastest of several readers of as many bytes as a pass reads, from the caches where
    these fit there: a sum, torch's product with a vector, and the compiled one where there is one. The rate is
    that of the best multiply-add instruction for weights of `dtype` with its operands in registers, and where there is
    no compiled code that of a square product. Each is the highest of the samples, for it is a limit.

    Args:
        dtype: that the passes multiply in.
        working_set: bytes that a pass reads; None for more than caches hold.
    """

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, working_set: int | None = None) -> None:
        least, side = (4 << 30, 8192) if device == "cuda" else (READ, 1024)
        size = min(working_set or least, least)
        large = torch.ones(ROWS * ceil(size / (4 * ROWS * COLUMNS)), COLUMNS, device=device)
        self._bytes, self._times = large.nbytes, ceil(least / large.nbytes)
        self._square = torch.ones(side, side, device=device, dtype=dtype)
        self._library = native.library() if device == "cpu" else None
        self._form = Form.BF16 if dtype == torch.bfloat16 else Form.FLOAT
        self._precision = PRECISIONS[dtype]
        self._settle = torch.cuda.synchronize if device == "cuda" else int
        self._readers = _readers(large, self._library)
        self._reading: list[float] = []
        self._multiplying: list[float] = []
        self.sample()
        self._reading.clear()  # the first sample includes page faults
        self._multiplying.clear()

    def sample(self) -> None:
        """Read and multiply for some milliseconds, in pieces as short as passes are: other work on the machine spoils
        a long one, whose rate would be no limit."""
        for read in self._readers * self._times:
            self._reading.append(self._bytes / timed(lambda read=read: (read(), self._settle())))  # type: ignore
        for _ in range(PIECES):
            start = time.perf_counter()
            operations = self._multiply()
            self._multiplying.append(operations / (time.perf_counter() - start))

    def _multiply(self) -> int:
        """Multiply for less than a millisecond; the operations done."""
        if self._library is not None:
            return self._library.truedraft_multiply(self._form, STEPS // PIECES, torch.get_num_threads())
        self._square @ self._square
        self._settle()
        return 2 * len(self._square) ** 3

    def machine(self) -> Machine:
        """The limits; at least one sample is required."""
        return Machine(max(self._reading), max(self._multiplying), self._precision)


def _readers(large: Tensor, library: Any) -> list[Callable[[], object]]:
    """Ways to read a matrix from front to back."""
    vector = torch.ones(1, large.shape[1], device=large.device)
    found: list[Callable[[], object]] = [large.sum, lambda: vector @ large.T]
    if library is not None:
        product = Product(library, panels(Weight(large, None, None)), torch.float32)
        found.append(lambda: product(vector))
    return found


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


def bytes_read(target: Target, context: int) -> int:
    """Bytes that a pass reads behind so many positions: weights, each once, and keys and values."""
    weights = sum(map(stored, _read_through(target)))
    c = target.model.config.get_text_config(decoder=True)
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    return weights + 2 * c.num_hidden_layers * context * heads * _head(c) * target.dtype.itemsize


def roofline(target: Target, machine: Machine, seconds: dict[int, float], context: int = 256) -> list[RooflinePoint]:
    """The floor of a pass and its measured time, at each measured width."""
    c = target.model.config.get_text_config(decoder=True)
    weights = sum(p.numel() for p in _read_through(target))
    attention = 4 * c.num_hidden_layers * context * c.num_attention_heads * _head(c)
    reading, rows = bytes_read(target, context) / machine.bandwidth, []
    for width, taken in seconds.items():
        multiplying = width * (2 * weights + attention) / machine.rate
        bound = "reading" if reading >= multiplying else "multiplying"
        rows.append(RooflinePoint(width, max(reading, multiplying), taken, bound))
    return rows


def _read_through(target: Target) -> list[Tensor]:
    """The weights that every pass reads: all but a table of embeddings that is no output head too."""
    model = target.model
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    tied = model.get_output_embeddings().weight is table
    return [p for p in model.parameters() if tied or p is not table]


def _head(config: Any) -> int:
    """The size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def timed(f: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
