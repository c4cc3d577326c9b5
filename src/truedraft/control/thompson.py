"""Thompson sampling: drafts get longer while samples of a row's rate of acceptance say so.

Liu et al., "Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling Control Mechanism",
Findings of ACL 2024 (arXiv 2406.03853), section 3.2. The rate at which a row's drafted tokens are accepted has a beta
distribution; before each further token a rate is drawn from it, and the token is drafted with that probability. How
many tokens that gives is drawn before the draft is made, with any drafter. It knows no costs: `cost`, the default, is
faster wherever drafts do not pay, and this is for comparisons and for machines on which no time can be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card
from truedraft.control._base import Control
from truedraft.drafters._bandit import Bandit
from truedraft.drafters._base import Drafter
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row


@dataclass
class Thompson(Control):
    card = Card(
        paper="arXiv 2406.03853 (2024)",
        idea="Draft on while rates drawn from the posterior of a row's acceptance say so.",
        family="bandit",
        published="EESD with it: faster than with fixed lengths; no single figure.",
    )

    def __post_init__(self) -> None:
        self._bandits: dict[int, Bandit] = {}  # by row

    def open(self, target: Target, drafter: Drafter, rows: int, lockstep: bool, steps: int) -> None:
        drafter.pass_cost = None

    def start(self, rows: Sequence[Row]) -> None:
        self._bandits |= {id(row): Bandit() for row in rows}

    def budget(self, rows: Sequence[Row]) -> list[int]:
        return [self._length(self._bandits[id(row)], row.request.drafter.width) for row in rows]

    @staticmethod
    def _length(bandit: Bandit, width: int) -> int:
        length = min(1, width)
        while length < width and bandit.continues():
            length += 1
        return length

    def observe(self, rows: Sequence[Row], trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        for row, tree, reached in zip(rows, trees, accepted, strict=True):
            if (bandit := self._bandits.get(id(row))) is not None:
                right = len(reached.path) - 1
                bandit.update(right, max(tree.shape.height - right, 0))

    def end(self, row: Row) -> None:
        self._bandits.pop(id(row), None)
