"""Several views as one: what any of them leaves out is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from truedraft.card import Card
from truedraft.views._base import WHOLE, Reduction, View


@dataclass(frozen=True)
class Together(View):
    """Views `a+b`."""

    parts: tuple[View, ...]

    def __post_init__(self) -> None:
        card = Card(paper="none", idea=f"{len(self.parts)} views as one.", family="self-drafting")
        object.__setattr__(self, "card", card)

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def fitted(self) -> Sequence[View]:
        return [one for part in self.parts for one in part.fitted]

    @property
    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes]

    def reduction(self, layers: int) -> Reduction:
        found = WHOLE
        for part in self.parts:
            found = found.joined(part.reduction(layers))
        return found

    @property
    def alternatives(self) -> Sequence[View]:
        choices = [(part, *part.alternatives) for part in self.parts]
        return [Together(parts) for parts in product(*choices)][1:]

    def behind(self, state: Tensor) -> View:
        return Together(tuple(part.behind(state) for part in self.parts))

    def at(self, depth: int) -> View:
        return Together(tuple(part.at(depth) for part in self.parts))
