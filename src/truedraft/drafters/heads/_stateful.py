"""Heads that carry a state per drafted token, without attention among drafts: contract, reader, trees, training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._learned import Batch
from truedraft.drafters.heads._drafter import HeadTree, TrainedDrafter
from truedraft.drafters.heads._head import Head, LearnedHead
from truedraft.drafters.heads._reader import HeadReader
from truedraft.drafters.heads._unroll import DRAFTED, StepwiseLearner, states_along
from truedraft.runtime.linears import Linears
from truedraft.runtime.panels import Int8Copies
from truedraft.tree import Accepted, Row, Scores


class StatefulHead(LearnedHead):
    """Predicts a few tokens after the pending one, from a state that every token changes.

    At step 0 the states are features of the target at the last token that it has read, and the token is the pending
    one; at step i it is the i-th drafted one.

    steps: tokens in a row that it can predict.
    prefix: attends over the features of a text before the first step, its `logits` being what that reads; None where
        the first step reads the features themselves.
    """

    steps: int
    prefix: Head | None

    def __init__(self, model: PreTrainedModel, prefix: Head | None = None):
        super().__init__(model, model.config.get_text_config(decoder=True))
        self.prefix = prefix

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [] if self.prefix is None else self.prefix.blocks

    def fuse(self, features: Tensor) -> Tensor:
        return features

    @abstractmethod
    def step(self, states: Tensor, tokens: Tensor, step: int) -> Tensor:
        """The states of a step, (..., their size), from those before, (..., size there), and (...) ids of tokens."""

    @abstractmethod
    def logits(self, states: Tensor, step: int = 0) -> Tensor:
        """The states of a step to (..., draft vocabulary)."""


class LastFeatures:
    """The features of the last token that the target has read of each row: all that a draft begins from."""

    def __init__(self, head: LearnedHead):
        self.head = head
        self._last: dict[int, Tensor | None] = {}

    def start(self, rows: Sequence[Row], more: int) -> None:
        self._last |= {id(row): None for row in rows}

    def end(self, row: Row) -> None:
        self._last.pop(id(row), None)

    def observe(self, rows: Sequence[Row], scores: Scores, accepted: Sequence[Accepted]) -> None:
        for place, (row, one) in enumerate(zip(rows, accepted, strict=True)):
            if not one.ended and id(row) in self._last:
                last = scores.features(place, one.path[-1:], self.head.layers)[-1]
                self._last[id(row)] = last.to(self.head.dtype, copy=True)

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Does nothing: there is nothing to read."""

    def tokens_read(self, row: Row, after: int) -> int | None:
        return None if self._last.get(id(row)) is None else len(row.tokens) - 1

    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        """(trees, size) features before the roots of trees."""
        return torch.stack([last for tree in growing if (last := self._last[id(tree.row)]) is not None])


class StatefulReader:
    """A `StatefulHead` as a `LevelReader`: the trees of a draft grow in step, and a level needs the states of the one
    before alone."""

    def __init__(self, head: StatefulHead, int8: Int8Copies | None = None):
        self.head = head
        self._features = LastFeatures(head) if head.prefix is None else HeadReader(head.prefix, int8)
        used: list[Any] = [head, head.output_head] if next(head.parameters()).device.type == "cpu" else []
        self._linears = Linears(nn.ModuleList(used), int8)
        self._states: Tensor | None = None  # of the last level
        self._places: dict[tuple[GrowingTree, int], int] = {}  # tree and node of the last level -> row of its state

    def refresh(self) -> None:
        """Read weights anew, which may have changed."""
        self._linears.refresh()

    def start(self, rows: Sequence[Row], more: int) -> None:
        self._features.start(rows, more)

    def end(self, row: Row) -> None:
        self._features.end(row)
        self._clear()

    def _clear(self) -> None:
        self._states = None
        self._places.clear()

    def observe(self, rows: Sequence[Row], scores: Scores, accepted: Sequence[Accepted]) -> None:
        """Keep the features of the tokens that a pass of the target has read for good."""
        self._features.observe(rows, scores, accepted)

    def catch_up(self, rows: Sequence[Row]) -> None:
        self._clear()
        self._features.catch_up(rows)

    def tokens_read(self, row: Row, after: int) -> int | None:
        return self._features.tokens_read(row, after)

    @torch.no_grad()
    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        frontier = [(tree, node) for tree in growing for node in tree.frontier]
        first, at = frontier[0]
        step = first.depth[at]
        if self._states is None:
            states = self.head.fuse(self._features.expand(growing))
        else:
            states = self._states[[self._places[tree, tree.parent[node]] for tree, node in frontier]]
        tokens = torch.tensor([tree.tokens[node] for tree, node in frontier], device=states.device)
        with self._linears.compiled():
            self._states = self.head.step(states, tokens, step)
            logits = self.head.logits(self._states, step)
        self._places = {one: place for place, one in enumerate(frontier)}
        return logits

    def grown(self, growing: Sequence[GrowingTree]) -> None:
        """Does nothing: the states of the level are needed by the next."""


class StatefulTree(TrainedDrafter, HeadTree):
    """Dynamic trees of a `StatefulHead`, as deep as it has steps at most.

    Fields of every subclass: those of `HeadTree`.
    """

    any_shape = False
    kind = StatefulHead
    reads = StatefulReader

    def open(self) -> None:
        self.reader.refresh()

    @property
    def levels(self) -> int:
        return min(self.depth, self.head.steps)


class StatefulLearner(StepwiseLearner):
    """Training of a `StatefulHead` on all of its steps. Subclasses have the knobs of `StepwiseLearner`."""

    module: StatefulHead

    @property
    def drafted(self) -> int:
        return min(DRAFTED, self.steps)

    def _passes(self, batch: Batch, tokens: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        head = self.module
        tapped = torch.cat([batch.features[layer] for layer in head.layers], -1)[:, :-1].to(head.dtype)
        states = head.fuse(tapped if head.prefix is None else head.prefix.logits(states_along(head.prefix, tapped)))
        for step, some in enumerate(tokens):
            states = head.step(states, some, step)
            yield states, head.logits(states, step)
