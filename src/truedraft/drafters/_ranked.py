"""Greedy drafts that grow from the likeliest tokens at each node, without the distributions of all tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from operator import itemgetter

from torch import Tensor

from truedraft.drafters._growing import GrowingDrafter, GrowingTree
from truedraft.drafters.models._reader import Reader
from truedraft.runtime._base import TreeGrowth
from truedraft.stores.likeliest import MOST, likeliest_with_chances, ranking
from truedraft.tree import DraftTree

WIDEST = 64  # nodes of a level that compiled code grows


class RankedGrowth(GrowingDrafter):
    """A drafter whose greedy drafts grow from the likeliest tokens at each node; others from whole distributions."""

    @abstractmethod
    def most_children(self, growing: GrowingTree) -> int:
        """Most tokens that `grow_ranked` needs at a node of the frontier."""

    @abstractmethod
    def grow_ranked(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        """Add the next level.

        tokens: for each of the nodes the likeliest ones, `most_children` or more, or all that are possible; the
            likeliest first. chances: the probability of each.
        """

    def growth(self, growing: Sequence[GrowingTree], rows: int) -> TreeGrowth | None:
        """How `grow_ranked` grows these trees, for compiled code; None where only that can.

        rows: in the pass that verifies.
        """
        return None

    def given_shape(self, growing: GrowingTree) -> Sequence[int] | None:
        """Numbers of children, node after node and level after level, of a tree of a given shape."""
        return None

    def _grown(self, growing: Sequence[GrowingTree]) -> list[DraftTree]:
        ready = [tree for tree in growing if tree.frontier]
        if ready and isinstance(self.reader, Reader) and all(map(self.greedy, ready)) and (rank := ranking()):
            growth = self.growth(ready, len(growing))
            if growth is not None and growth.children <= MOST and growth.width <= WIDEST:
                shapes = [self.given_shape(tree) for tree in ready]
                seconds = self.reader.grow_greedily(ready, growth._replace(rank=rank), shapes)
                for level, took in enumerate(seconds):
                    self._measure(took, begins=level == 0)
                if seconds:
                    return [self.finished(tree) for tree in growing]
        return super()._grown(growing)

    def _grow_level(self, active: Sequence[GrowingTree], logits: Tensor) -> None:
        if not all(map(self.greedy, active)):
            super()._grow_level(active, logits)
            return
        tokens, chances = likeliest_with_chances(logits, max(map(self.most_children, active)))
        if (ids := self._ids) is not None:
            tokens = [[ids[token] for token in some] for some in tokens]
        first = 0
        for growing in active:
            end = first + len(growing.frontier)
            self.grow_ranked(growing, growing.frontier, tokens[first:end], chances[first:end])
            first = end

    @property
    def _ids(self) -> Sequence[int] | None:
        """The token of each of the reader's logits; None where they are those of all tokens."""
        return None if self.vocabulary is None else self.vocabulary.listed


class LikeliestGrowth(RankedGrowth):
    """A drafter of the likeliest paths, also where they are not greedy: nothing is drawn, whatever the rule."""

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        values, tokens = laws.topk(min(self.most_children(growing), laws.shape[1]))
        chances = [[chance for chance in line if chance > 0] for line in values.tolist()]  # in order
        likely = [line[: len(some)] for line, some in zip(tokens.tolist(), chances, strict=True)]
        self.grow_ranked(growing, nodes, likely, chances)

    def add_likeliest(
        self, growing: GrowingTree, nodes: Sequence[int], tokens: Sequence[Sequence[int]],
        chances: Sequence[Sequence[float]], count: int,
    ) -> list[int]:  # fmt: skip
        """Add the `count` most probable continuations of all paths, with path probabilities as scores; returns their
        indices. tokens, chances: see `grow_ranked`."""
        score = growing.score
        paths = [
            (above * chance, node, token)
            for node, some, likely in zip(nodes, tokens, chances, strict=True)
            for above in (score.get(node, 1.0),)
            for token, chance in zip(some, likely, strict=True)
        ]
        paths.sort(key=itemgetter(0), reverse=True)
        best = paths[:count]
        added = growing.add_each([node for _, node, _ in best], [token for _, _, token in best])
        score.update(zip(added, [value for value, _, _ in best], strict=False))
        return added
