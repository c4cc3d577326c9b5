"""The only randomness: a token drawn from a law, at a row and a step; and what drafts and rules draw besides.

A sampled token is `argmax(p / e)` with `e` exponential noise, which is how `torch.multinomial` draws one sample.
So whoever knows the noise of a step knows the token, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from truedraft.tree import DraftTree, Row

T = TypeVar("T")
TINY = np.finfo(np.float32).tiny  # in the place of an exact 0, which would pick its token whatever the law


class Chance(Protocol):
    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        """One token per row, -1 where its law is NaN. law: (k, V) probabilities for the next tokens of the k rows."""
        ...

    def draw(self, law: Tensor, row: Row) -> int:
        """A token from a (V,) law by fresh noise, for a row's drafts: independent of every pick."""
        ...

    def flip(self, probability: float, row: Row) -> bool:
        """True with this probability, by fresh noise."""
        ...

    def ahead(self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree]) -> Tensor | None:
        """The noise at every node of the trees, (rows, width, V) like the logits, or None: to be asked step by step."""
        return None

    def reached(self, step: int) -> None:
        """The rows have emitted up to `step` tokens: noise looked at beyond was not used."""
        return None

    def passed(self, step: int) -> None:
        """No row will ask for a step before `step` again."""
        return None


def drawn(law: Tensor, noise: Tensor) -> list:
    """The token that each law draws with its noise, as nested lists; -1 where a law is NaN."""
    value, token = (law / noise).max(-1)
    return token.masked_fill_(value.isnan(), -1).tolist()


def far(device: torch.device) -> bool:
    """Whether reading a result makes the host wait, so that one read of all nodes is worth scoring some in vain."""
    return device.type == "cuda"


class StreamNoise(Chance):
    """The noise that `model.generate` would draw: one (batch, V) block of torch's own stream per step.

    A block is drawn when the first row reaches its step and kept until the last row has passed it, so neither
    drafts nor ragged acceptance change what any row receives, nor where the stream stands afterwards. Blocks that
    were looked at ahead are kept too, and the stream is put back to where the rows are.
    """

    def __init__(self, batch: int):
        self.batch = batch
        self.blocks: dict[int, Tensor] = {}
        self.drawn = self.steps = 0  # blocks drawn, and those that plain decoding would have drawn
        self.states: dict[int, Tensor] = {}  # of the stream before a block, where blocks were drawn ahead

    def _draw(self, like: Tensor) -> None:
        block = torch.empty(self.batch, like.shape[-1], device=like.device)
        self.blocks[self.drawn] = block.exponential_(1)
        self.drawn += 1

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        for _ in range(self.drawn, max(row.step for row in rows) + 1):
            self._draw(law)
        return drawn(law, torch.stack([self.blocks[row.step][row.index] for row in rows]))

    def draw(self, law: Tensor, row: Row) -> int:
        return int(torch.multinomial(law, 1))

    def flip(self, probability: float, row: Row) -> bool:
        return bool(torch.rand(()) < probability)

    def ahead(self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree]) -> Tensor | None:
        if not far(logits.device):
            return None
        self._device = logits.device
        if self.drawn in self.states:
            _set_state(self._device, self.states[self.drawn])
        needed = max(row.step + max(tree.shape.depth) for row, tree in zip(rows, trees, strict=True)) + 1
        for _ in range(self.drawn, needed):
            self.states.setdefault(self.drawn, _state(self._device))
            self._draw(logits)
        self.states.setdefault(self.drawn, _state(self._device))
        noise = []
        for row, tree in zip(rows, trees, strict=True):
            depth = tree.shape.depth + (0,) * (logits.shape[1] - len(tree))
            noise += [self.blocks[row.step + d][row.index] for d in depth]
        return torch.stack(noise).unflatten(0, logits.shape[:2])

    def reached(self, step: int) -> None:
        self.steps = max(self.steps, step)
        if self.states:
            _set_state(self._device, self.states[self.steps])
            self.states = {s: state for s, state in self.states.items() if s >= self.steps}

    def passed(self, step: int) -> None:
        for old in [s for s in self.blocks if s < step]:
            del self.blocks[old]


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class PositionNoise(Chance):
    """Noise tied to (seed, row, step) by a counter-based generator (Philox).

    A row's text does not depend on its neighbours.

    Args:
        seeds: (seed, row key) for each row of the batch.
    """

    def __init__(self, seeds: Sequence[tuple[int, int]]):
        self.seeds = seeds
        self.fresh = [0] * len(seeds)  # how often each row asked for noise that belongs to no step

    def _bits(self, row: Row, step: int, fresh: int) -> np.random.Generator:
        bits = np.random.Philox(key=self.seeds[row.index], counter=[0, step, fresh, 0])
        return np.random.Generator(bits)

    def _fresh(self, row: Row) -> np.random.Generator:
        self.fresh[row.index] += 1
        return self._bits(row, 0, self.fresh[row.index])

    def draw(self, law: Tensor, row: Row) -> int:
        noise = self._fresh(row).standard_exponential(law.shape, dtype=np.float32)
        return int((law / torch.from_numpy(np.maximum(noise, TINY)).to(law.device)).argmax())

    def flip(self, probability: float, row: Row) -> bool:
        return bool(self._fresh(row).random() < probability)

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        noise = np.empty(law.shape, dtype=np.float32)
        for line, row in zip(noise, rows, strict=True):
            self._bits(row, row.step, 0).standard_exponential(dtype=np.float32, out=line)
        np.maximum(noise, TINY, out=noise)
        return drawn(law, torch.from_numpy(noise).to(law.device))


class Replay(Chance):
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

    def draw(self, law: Tensor, row: Row) -> int:
        return self.branch(list(enumerate(law.tolist())))

    def flip(self, probability: float, row: Row) -> bool:
        return bool(self.branch([(1, min(probability, 1.0)), (0, max(1 - probability, 0.0))]))


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
