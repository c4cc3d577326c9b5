"""Policies that go over the tokens of a block again: none is final before the whole block is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.canvas._base import NOTHING, CanvasRow, Fixed, Predictions
from truedraft.canvas.policies.lossy._base import LossyPolicy


@dataclass
class Pending:
    """A block that is not final yet.

    tokens: what is written, by position.
    passes: so far, over it without masks.
    """

    block: range
    tokens: dict[int, int] = field(default_factory=dict)
    passes: int = 0


class Editing(LossyPolicy):
    """A policy whose steps fill masks of a block and replace other tokens of it, of which the model has become sure of
    another. The block is final after a pass that replaced nothing, or a number of passes over all of it."""

    @property
    @abstractmethod
    def surer_than(self) -> float:
        """What the probability of another token must exceed to replace one."""

    @property
    @abstractmethod
    def again(self) -> int:
        """Most passes over the block when it has no masks."""

    @abstractmethod
    def fill(self, masked: Sequence[int], predictions: Predictions) -> Sequence[int]:
        """Which masks are filled next, at least one; masked: their indices by falling confidence, at least one."""

    def choose(self, predictions: Predictions, row: CanvasRow) -> Fixed:
        pending: Pending | None = row.memory.get(id(self))
        if pending is None or pending.block != predictions.block:
            row.memory[id(self)] = pending = Pending(predictions.block)
        written, places = pending.tokens, predictions.positions
        masked = [i for i in predictions.order if places[i] not in written]
        pending.passes += not masked
        edits = [i for i, place in enumerate(places) if place in written and self._replaces(predictions, i, written)]
        changed = [*edits, *(self.fill(masked, predictions) if masked else ())]
        written.update(predictions.fix(changed))
        if len(written) == len(places) and (not changed or pending.passes >= self.again):
            return frozenset(written.items())
        row.canvas.write(frozenset(written.items()))
        return NOTHING

    def _replaces(self, predictions: Predictions, i: int, written: dict[int, int]) -> bool:
        other = predictions.tokens[i] != written[predictions.positions[i]]
        return other and predictions.probability[i] > self.surer_than
