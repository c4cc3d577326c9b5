"""The noise of sampled tokens: a function of (seed, row, position, step), whatever else a pass scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

TINY = np.finfo(np.float32).tiny


class CanvasNoise:
    """Exponential noise by a counter-based generator (Philox). A token is drawn as argmax(p / e), as
    `torch.multinomial` draws one.

    seed: of the call.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def at(self, row: int, positions: Sequence[int], step: int, size: int) -> Tensor:
        """(n, size) noise of these positions at a step."""
        noise = np.empty((len(positions), size), dtype=np.float32)
        for line, position in zip(noise, positions, strict=True):
            bits = np.random.Philox(key=(self.seed, row), counter=[0, position, step, 1])
            np.random.Generator(bits).standard_exponential(dtype=np.float32, out=line)
        return torch.from_numpy(np.maximum(noise, TINY, out=noise))
