"""The contract of a drafter of any-subset models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from truedraft.canvas._base import Canvas
from truedraft.card import Card


class SubsetDrafter(ABC):
    """Proposes tokens at the first masked positions of a canvas, to be verified in one pass."""

    card: ClassVar[Card]

    @property
    def ahead(self) -> int:
        """Positions behind the draft and the token after it that a pass predicts too, for the next draft."""
        return 0

    @abstractmethod
    def draft(self, canvas: Canvas, masks: Sequence[int], chosen: Mapping[int, int]) -> list[int]:
        """Tokens at the first masked positions, in order; none for a pass that fixes one position.

        Args:
            masks: all masked positions, in order.
            chosen: position -> token, of those that the last pass has predicted ahead.
        """
