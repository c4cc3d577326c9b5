"""Passes of a canvas target, as latency profiles time them (`runtime/latency.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from truedraft.canvas.targets import CanvasTarget


class CanvasPasses:
    """Passes over a text that is not reserved by a call."""

    vocabulary = 1
    hard_limit = None
    cold = False

    def __init__(self, target: CanvasTarget):
        self._target = target
        self.device, self.weight_bytes, self.cost_key = target.device, target.weight_bytes, target.cost_key

    @contextmanager
    def temporary_cache(self, rows: int, capacity: int) -> Iterator[None]:
        self._target.reserve(rows, capacity, 0)
        try:
            yield
        finally:
            self._target.free()

    def prompt(self, ids: Any) -> Any:
        return ids

    def prefill(self, prompts: Sequence[Any]) -> Any:
        self._target.admit([[0]])
        self._target.probe(1)

    def score(self, trees: Sequence[Any]) -> Any:
        self._target.probe(len(trees[0]))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
