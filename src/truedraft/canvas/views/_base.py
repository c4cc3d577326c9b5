"""The contract of views of diffusion models: which positions of a canvas a pass computes, and what these read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from truedraft.canvas._base import CanvasRow, Policy
from truedraft.card import Card, method_name


@dataclass(frozen=True)
class Attention:
    """What one layer of a pass attends with, of one row.

    layer: its index.
    positions: (q,) those that the pass computes, in order.
    queries: (heads, q, d), not scaled.
    keys: (heads, n, d) of all positions, those computed by this pass among them.
    scale: of their products.
    """

    layer: int
    positions: Sequence[int]
    queries: Tensor
    keys: Tensor
    scale: float

    @cached_property
    def weights(self) -> Tensor:
        """(heads, q, n) fp32, of attention to everything."""
        return (self.queries.float() @ self.keys.float().transpose(1, 2) * self.scale).softmax(-1)


class CanvasView(ABC):
    """A lighter way to score a canvas that is attended to as a whole.

    A pass computes some positions of a row anew. At all others keys and values are those that were stored when the
    position was computed last, whatever has been fixed since; the first pass of a row computes everything. Where logits
    are for the next position, those before masked ones are computed too. Only masked positions that are computed are
    predicted, and a policy chooses among them.

    A subclass is a dataclass whose fields are its knobs. What it learns of a row is in `row.memory`, by its id.

    reads_attention: whether it sees and limits what is attended to (`attend`), which takes the model's own forward.
    """

    card: ClassVar[Card]
    reads_attention: ClassVar[bool] = False

    @property
    def lossy(self) -> str:
        """Its name, or that of a preset whose knobs it has, as what a model generates under."""
        presets = self.card.presets.items()
        alike = (name for name, knobs in presets if all(getattr(self, key) == knobs[key] for key in knobs))
        return f"lossy/{next(alike, method_name(self))}"

    def check(self, policy: Policy) -> None:
        """Raises Refused where the view cannot serve this policy."""

    @abstractmethod
    def positions(self, row: CanvasRow) -> Iterable[int]:
        """The positions that the next pass of a row computes, at least one masked one of its block among them; not
        asked before the first pass."""

    def attend(self, row: CanvasRow, attention: Attention) -> Tensor | None:
        """Which positions are read in a layer of a pass, (heads or 1, q, n) bool; None for all."""
        return None

    def scored(self, row: CanvasRow, positions: Sequence[int], logits: Tensor) -> None:
        """The (m, V) logits at all masked positions that a pass has computed; of views that read attention."""


def whole(row: CanvasRow) -> range:
    """All positions of a canvas."""
    return range(len(row.canvas))


def steps_within(row: CanvasRow) -> int:
    """Steps of a row since its block became the one that is being filled."""
    start = row.block.start
    before = (i for i, step in enumerate(reversed(row.taken)) if any(position < start for position, _ in step))
    return next(before, row.step)


def renewed(row: CanvasRow, every: int) -> bool:
    """Whether the next pass is the first over the block, or, where `every` is not 0, that many passes behind one that
    was renewed."""
    steps = steps_within(row)
    return not steps or (every > 0 and steps % every == 0)


def masked(row: CanvasRow) -> list[int]:
    """All masked positions of a canvas."""
    return row.canvas.masked(whole(row))


def latest(row: CanvasRow) -> set[int]:
    """The positions that the last step has fixed."""
    return {position for position, _ in row.taken[-1]}
