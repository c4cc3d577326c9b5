"""The only randomness: a token drawn from a law, at a row and a step.

A sampled token is `argmax(p / e)` with `e` exponential noise, which is how `torch.multinomial` draws one sample.
So whoever knows the noise of a step knows the token, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from truedraft.tree import Row

T = TypeVar("T")


class Chance(Protocol):
    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        """One token per row, -1 where its law is NaN. law: (k, V) probabilities for the next tokens of the k rows."""
        ...

    def passed(self, step: int) -> None:
        """No row will ask for a step before `step` again."""
        ...


def _argmax(law: Tensor, noise: Tensor) -> list[int]:
    value, token = (law / noise).max(-1)
    return token.masked_fill_(value.isnan(), -1).tolist()


class StreamNoise:
    """The noise that `model.generate` would draw: one (batch, V) block of torch's own stream per step.

    A block is drawn when the first row reaches its step and kept until the last row has passed it, so neither
    drafts nor ragged acceptance change what any row receives, nor where the stream stands afterwards.
    """

    def __init__(self, batch: int):
        self.batch = batch
        self.blocks: dict[int, Tensor] = {}
        self.drawn = 0

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        for _ in range(self.drawn, max(row.step for row in rows) + 1):
            self.blocks[self.drawn] = law.new_empty(self.batch, law.shape[-1]).exponential_(1)
            self.drawn += 1
        return _argmax(law, torch.stack([self.blocks[row.step][row.index] for row in rows]))

    def passed(self, step: int) -> None:
        for old in [s for s in self.blocks if s < step]:
            del self.blocks[old]


class PositionNoise:
    """Noise tied to (seed, row, step) by a counter-based generator (Philox).

    A row's text does not depend on its neighbours.

    Args:
        seeds: (seed, row key) for each row of the batch.
    """

    def __init__(self, seeds: Sequence[tuple[int, int]]):
        self.seeds = seeds

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        noise = np.empty(law.shape, dtype=np.float32)
        for line, row in zip(noise, rows, strict=True):
            bits = np.random.Philox(key=self.seeds[row.index], counter=[0, row.step, 0, 0])
            np.random.Generator(bits).standard_exponential(dtype=np.float32, out=line)
        np.maximum(noise, np.finfo(np.float32).tiny, out=noise)  # an exact 0 would pick its token whatever the law
        return _argmax(law, torch.from_numpy(noise).to(law.device))

    def passed(self, step: int) -> None:
        pass


class Replay:
    """A Chance that follows a given script of picks, and notes the odds of each; see `outcomes`."""

    def __init__(self, script: Sequence[int]):
        self.script = list(script)
        self.taken: list[tuple[int, list[tuple[int, float]]]] = []  # (branch, its alternatives)
        self.probability = 1.0

    def branch(self, odds: Sequence[tuple[int, float]]) -> int:
        """Choose among (value, probability) pairs as the script says, else the first."""
        options = [(v, p) for v, p in odds if p > 0]
        i = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append((i, options))
        self.probability *= options[i][1]
        return options[i][0]

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        return [self.branch(list(enumerate(p.tolist()))) for p in law]

    def passed(self, step: int) -> None:
        pass


def outcomes(f: Callable[[Replay], T]) -> Iterator[tuple[T, float]]:
    """Every result of `f(chance)` with its exact probability: f is replayed over every pick it can make."""
    script: list[int] = []
    while True:
        chance = Replay(script)
        yield f(chance), chance.probability
        choices = [(i, len(options)) for i, options in chance.taken]
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return
        script = [i for i, _ in choices[:-1]] + [choices[-1][0] + 1]
