"""Passes of a target over trees that grow: nodes behind those that earlier passes wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from truedraft.runtime._base import GreedyChain, GrownTree, Runner, TreeGrowth, TreeLimits
from truedraft.tree import DraftTree, Taps

Made = TypeVar("Made")


class ExtendingPasses(Protocol):
    """What `Target` does with trees that grow, by its runner."""

    runner: Runner

    def _run(self, make: Callable[[], Made]) -> Made: ...

    def extend(self, trees: Sequence[DraftTree], written: Sequence[int], last: Sequence[int]) -> Tensor:
        return self.extend_tapped(trees, written, last, Taps())[0]

    def extend_tapped(
        self, trees: Sequence[DraftTree], written: Sequence[int], last: Sequence[int], taps: Taps
    ) -> tuple[Tensor, dict[int, Tensor]]:
        return self._run(lambda: self.runner.extend(trees, written, last, taps))

    def extend_greedily(
        self, trees: Sequence[DraftTree], written: Sequence[int], chains: Sequence[GreedyChain | None]
    ) -> list[list[int]] | None:
        return self.runner.extend_greedily(trees, written, chains)

    def extend_trees(
        self,
        trees: Sequence[DraftTree],
        written: Sequence[int],
        growth: TreeGrowth,
        limits: Sequence[TreeLimits | None],
    ) -> tuple[list[GrownTree | None], list[float]] | None:
        return self.runner.extend_trees(trees, written, growth, limits)
