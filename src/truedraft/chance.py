"""All random numbers: tokens drawn from a law at a row and a step, and further draws of drafters and rules.

A sampled token is `argmax(p / e)` with `e` exponential noise, as `torch.multinomial` draws one sample. So the noise of
a step determines its token, whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from truedraft.stores.likeliest import largest
from truedraft.tree import DraftTree, Row

T = TypeVar("T")
TINY = np.finfo(np.float32).tiny  # instead of an exact 0, which would choose its token under any law


class Chance(Protocol):
    """The source of random draws.

    kept_by_step: noise is kept for all rows from the step of the last row to that of the first.
    keys: law / noise of the last pick, (k, V) or (rows, nodes, V); the tokens picked are its argmax. None where there
        was none.
    """

    keys: Tensor | None = None
    kept_by_step: bool = False

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        """One token per row, -1 where its law is NaN. law: (k, V) probabilities for the next tokens of the k rows."""
        ...

    def draw(self, law: Tensor, row: Row, count: int = 1, distinct: bool = False) -> list[int]:
        """Tokens from a (V,) law by fresh noise, independent of every pick, for a row's drafts; in order.

        distinct: without replacement; fewer than `count` where the law allows no more.
        """
        ...

    def draw_each(self, laws: Tensor, row: Row, counts: Sequence[int]) -> list[list[int]]:
        """So many tokens from each of some (k, V) laws, as `draw` draws them with replacement."""
        return [self.draw(law, row, count) for law, count in zip(laws, counts, strict=True)]

    def wait(self, row: Row) -> float:
        """A waiting time, exponentially distributed with mean 1, by fresh noise."""
        ...

    def target_noise(self, row: Row, after: Sequence[int], like: Tensor) -> Tensor | None:
        """(k, V) noise of the k steps `after` after the row's next one, None where it is not available.

        like: a tensor on the device of the target, its last dimension V.
        """
        return None

    def flip(self, probability: float, row: Row) -> bool:
        """True with this probability, by fresh noise."""
        ...

    def beside(self) -> Chance | None:
        """A source of draws for drafts that a thread makes while this one is in use: independent of it, and of how the
        two take turns. None where there is none. From then on the stream of plain decoding is not restored."""
        return None

    def noise_at_nodes(self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree]) -> Tensor | None:
        """The noise at every node of the trees, (rows, width, V) like the logits, or None to use `pick`."""
        return None

    def reached(self, step: int) -> None:
        """Called when rows have emitted up to `step` tokens: noise drawn for later steps was not used."""
        return None

    def passed(self, step: int) -> None:
        """Called when noise before `step` is no longer needed."""
        return None


def likeliest(law: Tensor, count: int) -> list[int]:
    """The tokens of a (V,) law with the largest values, at most `count`, all of them with p > 0."""
    value, token = law.topk(min(count, len(law)))
    return token[value > 0].tolist()


def far(device: torch.device) -> bool:
    """Whether reading a result synchronises with a device, so that one read of all nodes is cheaper than several."""
    return device.type == "cuda"


class StreamNoise(Chance):
    """The noise that `model.generate` would draw: one (batch, V) block of torch's own stream per step.

    A block is drawn when the first row reaches its step and kept until the last row has passed it, so neither
    drafts nor acceptance of different lengths change the noise of a row or the state of the stream afterwards. Blocks
    drawn for later steps are kept too, and the stream is reset to the state at the rows' step.
    """

    kept_by_step = True

    def __init__(self, batch: int):
        self.batch = batch
        self.blocks: dict[int, Tensor] = {}
        self.drawn = self.steps = 0  # blocks drawn, and those that plain decoding would have drawn
        self.states: dict[int, Tensor] = {}  # of the stream before a block, where blocks were drawn early
        self._beside: PositionNoise | None = None

    def _draw(self, like: Tensor) -> None:
        block = torch.empty(self.batch, like.shape[-1], dtype=torch.float32, device=like.device)
        self.blocks[self.drawn] = block.exponential_(1)
        self.drawn += 1

    def _look(self, step: int, like: Tensor) -> None:
        """Draw the blocks up to a step, and keep the state of the stream before each."""
        if step < self.drawn:
            return
        if self._beside is not None:
            for _ in range(self.drawn, step + 1):
                self._draw(like)
            return
        self._device = like.device
        if self.drawn in self.states:
            _set_state(self._device, self.states[self.drawn])
        for _ in range(self.drawn, step + 1):
            self.states.setdefault(self.drawn, _state(self._device))
            self._draw(like)
        self.states[self.drawn] = _state(self._device)

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        last = max(row.step for row in rows)
        if self.states:
            self._look(last, law)
        for _ in range(self.drawn, last + 1):
            self._draw(law)
        self.keys = law / torch.stack([self.blocks[row.step][row.index] for row in rows])
        return largest(self.keys)

    def draw(self, law: Tensor, row: Row, count: int = 1, distinct: bool = False) -> list[int]:
        most = min(count, int(law.count_nonzero())) if distinct else count
        return torch.multinomial(law, most, replacement=not distinct).tolist()

    def draw_each(self, laws: Tensor, row: Row, counts: Sequence[int]) -> list[list[int]]:
        below = laws.double().cumsum(-1)
        whole = below[:, -1:]
        at = torch.rand(len(counts), max(counts), dtype=torch.float64, device=laws.device) * whole
        found = torch.searchsorted(below, at.minimum(whole.nextafter(torch.zeros_like(whole))), right=True).tolist()
        return [tokens[:count] for tokens, count in zip(found, counts, strict=True)]

    def wait(self, row: Row) -> float:
        return float(torch.empty(()).exponential_(1))

    def flip(self, probability: float, row: Row) -> bool:
        return bool(torch.rand(()) < probability)

    def beside(self) -> Chance | None:
        if self._beside is None:
            seed = int(torch.randint(1 << 62, ()))
            self._beside = PositionNoise([(seed, i) for i in range(self.batch)])
        return self._beside

    def target_noise(self, row: Row, after: Sequence[int], like: Tensor) -> Tensor | None:
        self._look(row.step + max(after), like)
        return torch.stack([self.blocks[row.step + n][row.index] for n in after])

    def noise_at_nodes(self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree]) -> Tensor | None:
        if not far(logits.device):
            return None
        self._look(max(row.step + tree.shape.height for row, tree in zip(rows, trees, strict=True)), logits)
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
        lane: of sources with the same seeds, each with a lane of its own, none has noise of another.
    """

    def __init__(self, seeds: Sequence[tuple[int, int]], lane: int = 0):
        self.seeds, self.lane = seeds, lane
        self._beside: PositionNoise | None = None
        self.fresh = [0] * len(seeds)  # draws of each row that belong to no step

    def _bits(self, row: Row, step: int, fresh: int) -> np.random.Generator:
        bits = np.random.Philox(key=self.seeds[row.index], counter=[0, step, fresh, self.lane])
        return np.random.Generator(bits)

    def _fresh(self, row: Row) -> np.random.Generator:
        self.fresh[row.index] += 1
        return self._bits(row, 0, self.fresh[row.index])

    def _noise(self, bits: np.random.Generator, size: int) -> Tensor:
        return torch.from_numpy(np.maximum(bits.standard_exponential(size, dtype=np.float32), TINY))

    def draw(self, law: Tensor, row: Row, count: int = 1, distinct: bool = False) -> list[int]:
        if distinct:
            return likeliest(self._keys(law, row), count)
        return [likeliest(self._keys(law, row), 1)[0] for _ in range(count)]

    def _keys(self, law: Tensor, row: Row) -> Tensor:
        return law / self._noise(self._fresh(row), len(law)).to(law.device)

    def beside(self) -> Chance | None:
        if self._beside is None:
            self._beside = PositionNoise(self.seeds, self.lane + 1)
        return self._beside

    def wait(self, row: Row) -> float:
        return float(self._fresh(row).standard_exponential())

    def target_noise(self, row: Row, after: Sequence[int], like: Tensor) -> Tensor | None:
        noise = {n: self._noise(self._bits(row, row.step + n, 0), like.shape[-1]) for n in set(after)}
        return torch.stack([noise[n] for n in after]).to(like.device)

    def flip(self, probability: float, row: Row) -> bool:
        return bool(self._fresh(row).random() < probability)

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        noise = np.empty(law.shape, dtype=np.float32)
        for line, row in zip(noise, rows, strict=True):
            self._bits(row, row.step, 0).standard_exponential(dtype=np.float32, out=line)
        np.maximum(noise, TINY, out=noise)
        self.keys = law / torch.from_numpy(noise).to(law.device)
        return largest(self.keys)


class Replay(Chance):
    """A Chance that follows a script of choices, and records the odds of each; see `outcomes`."""

    def __init__(self, script: Sequence[int]):
        self.script = list(script)
        self.choices: list[tuple[int, list[tuple[int, float]]]] = []  # (branch, its alternatives)
        self.probability = 1.0

    def branch(self, odds: Sequence[tuple[int, float]]) -> int:
        """Choose among (value, probability) pairs by the script, the first beyond its end."""
        options = [(v, p) for v, p in odds if p > 0]
        i = self.script[len(self.choices)] if len(self.choices) < len(self.script) else 0
        self.choices.append((i, options))
        self.probability *= options[i][1]
        return options[i][0]

    def pick(self, law: Tensor, rows: Sequence[Row]) -> list[int]:
        return [self.branch(list(enumerate(p.tolist()))) for p in law]

    def draw(self, law: Tensor, row: Row, count: int = 1, distinct: bool = False) -> list[int]:
        tokens: list[int] = []
        for _ in range(count):
            odds = [(t, p) for t, p in enumerate(law.tolist()) if not (distinct and t in tokens)]
            if (left := sum(p for _, p in odds)) > 0:
                tokens.append(self.branch([(t, p / left) for t, p in odds]))
        return tokens

    def wait(self, row: Row) -> float:
        return 1.0

    def flip(self, probability: float, row: Row) -> bool:
        return bool(self.branch([(1, min(probability, 1.0)), (0, max(1 - probability, 0.0))]))


def outcomes(f: Callable[[Replay], T]) -> Iterator[tuple[T, float]]:
    """Every result of `f(chance)` with its exact probability: f is called once for every sequence of choices."""
    script: list[int] = []
    while True:
        chance = Replay(script)
        yield f(chance), chance.probability
        choices = [(i, len(options)) for i, options in chance.choices]
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return
        script = [i for i, _ in choices[:-1]] + [choices[-1][0] + 1]
