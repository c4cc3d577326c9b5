"""An oracle drafter, for measuring the engine: the speed-up attained at a given acceptance rate.

It drafts the true continuation, each token replaced by a wrong one with a set probability, so that the attained
speed-up can be compared with theory at every acceptance rate. It is no method: it is not registered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from truedraft.accelerated import accelerate
from truedraft.bench.roofline import measure_passes
from truedraft.bench.workloads import Workload
from truedraft.card import Card
from truedraft.drafters._base import Drafter
from truedraft.tree import DraftTree, Row

RATES = (0.6, 0.8, 0.9)
LENGTHS = (4, 8)


@dataclass
class Oracle(Drafter):
    """Drafts chains from the known outputs.

    truth: row index -> all tokens of the row, prompt and output.
    rate: probability that a drafted token is the true one, given that those before it were.
    length: tokens drafted per pass.
    """

    card = Card(paper="none", idea="Draft the known output, corrupted at a set rate.", family="measurement")
    truth: Mapping[int, Sequence[int]]
    rate: float
    length: int
    vocabulary: int
    seed: int = 0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def width(self) -> int:
        return self.length

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return [
            DraftTree.chain(row.tokens[-1], self._drafted(row, min(self.length, most)))
            for row, most in zip(rows, budget, strict=True)
        ]

    def _drafted(self, row: Row, count: int) -> list[int]:
        true = self.truth[row.index][len(row.tokens) : len(row.tokens) + count]
        return [t if self._random.random() < self.rate else (t + 1) % self.vocabulary for t in true]


@dataclass(frozen=True)
class Attained:
    """The speed-up over decoding without drafts: by theory, and attained (medians)."""

    workload: str
    rate: float
    drafted: int
    mean_acceptance_length: float
    theory: float
    attained: float

    @property
    def share(self) -> float:
        """Attained over theoretical speed-up; 1 at best, apart from noise."""
        return self.attained / self.theory


def theory(rate: float, length: int, width_1: float, width_all: float) -> float:
    """The theoretical speed-up: expected tokens per pass over the cost of the pass, in plain passes.

    The expected length is (1 - rate^(length + 1)) / (1 - rate) (Leviathan et al. 2023, eq. 1), bonus included.
    """
    expected = length + 1 if rate >= 1 else (1 - rate ** (length + 1)) / (1 - rate)
    return expected * width_1 / width_all


def attain(
    model: Any, tokenizer: Any, workloads: Sequence[Workload], progress: Callable[[str], None], rounds: int = 5
) -> list[Attained]:
    """The oracle at a few rates and lengths on the first prompt of each workload, against theory.

    Times are without the prompt's pass, with and without drafts in turns; theory uses passes measured in the same run.
    """
    plain = accelerate(model, tokenizer, draft=None)
    found = []
    for workload in workloads:
        text = workload.items[0].text
        inputs = dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False).to(model.device))
        settings: dict[str, Any] = {**inputs, "max_new_tokens": workload.tokens, "do_sample": False}
        truth = {0: plain.generate(**settings)[0].tolist()}
        for rate in RATES:
            for length in LENGTHS:
                progress(f"{workload.name}: oracle drafts at rate {rate}, {length} drafted")
                oracle = Oracle(truth, rate, length, len(tokenizer))
                fast = accelerate(model, tokenizer, draft=oracle, control="fixed")
                cost = measure_passes([fast.target], inputs["input_ids"].shape[1], (1, length + 1), rounds)[0]
                ratios, lengths = [], []
                for _ in range(rounds):
                    spent = []
                    for side in (plain, fast):
                        start = time.perf_counter()
                        side.generate(**settings)
                        spent.append(time.perf_counter() - start - side.report().seconds["prefill"])
                    ratios.append(spent[0] / spent[1])
                    lengths.append(fast.report().mean_acceptance_length)
                expected = theory(rate, length, cost[1], cost[length + 1])
                found.append(
                    Attained(workload.name, rate, length, median(lengths), expected, median(ratios))
                )  # fmt: skip
    return found
