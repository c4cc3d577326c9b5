"""Fixed: every draft at its full published size, whatever it costs.

For measurements of acceptance, and for machines whose best size was measured; it may be slower than plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.card import Card, knob
from truedraft.control._base import Control
from truedraft.drafters._base import Drafter
from truedraft.targets._base import Target
from truedraft.tree import Row


@dataclass
class Fixed(Control):
    card = Card(paper="none", idea="Always draft and verify as much as the drafter offers.", family="fixed")
    nodes: int = knob(0, 0, 4096)  # nodes drafted per row and pass; 0 for the drafter's own size

    def open(self, target: Target, drafter: Drafter, rows: int, lockstep: bool, steps: int) -> None:
        drafter.pass_cost = None

    def budget(self, rows: Sequence[Row]) -> list[int]:
        return [self.nodes or row.request.drafter.width for row in rows]
