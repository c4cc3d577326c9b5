"""Super Apriel: the same checkpoint drafts with lighter token mixers in its layers, and verifies with its own.

Ostapenko et al., "Super Apriel: One Checkpoint, Many Speeds", 2026 (arXiv 2604.19877): every layer of a supernet has
full attention, attention to a window and two kinds of recurrent states, trained to be exchanged for each other. The
lighter placement is a draft model here that shares all weights with the target and has a KV cache of its own; it pays
behind texts longer than the window. Mixers with states are refused, because drafts have to be taken back. The placement
alone, an approximation, is the model with these mixers set active.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.card import Card, knob
from truedraft.drafters.models._model import ChainDrafter
from truedraft.drafters.models._reader import Reader
from truedraft.errors import Refused
from truedraft.runtime.placements import Choice, choices, placed
from truedraft.targets._base import Target


def _names(placement: str) -> list[str]:
    """The names in a placement."""
    if placement and not all(names := placement.split(";")):
        raise ValueError
    return names if placement else []


@dataclass
class SuperApriel(ChainDrafter):
    card = Card(
        paper="arXiv 2604.19877 (2026)",
        idea="The same checkpoint drafts with lighter token mixers in its layers.",
        family="draft model",
        needs=("mixers",),
        cannot={"encoder-decoder": "none is a supernet"},
        published="Placements of 15B alone, lossy: 2.9x to 10.7x the throughput; drafting is named without figures.",
        lacks={
            "super-apriel": "placements of full attention and windows draft; mixers with recurrent states are refused, "
            "and neither the search for placements nor the training is here",
        },
    )
    placement: str = knob("", form="names of mixers, such as a;b, along the layers", reader=_names)  # or of windows
    length: int = knob(7, 1, 256)  # tokens drafted at most, as of draft-model; none is published
    confidence: float = knob(0.0, 0, 1)  # end a draft after a token of lower probability

    def __post_init__(self) -> None:
        """The draft model is known with the target alone."""

    @property
    def vocab_size(self) -> None:
        """None: the target's."""

    def bind(self, target: Target) -> None:
        model: Any = target.model
        name, found = type(model).__name__, choices(model)
        if not found:
            raise Refused(
                f"super-apriel drafts with other token mixers of the same layers, and those of {name} have one each"
            )
        names = _names(self.placement) or _windows(found)
        lighter = placed(model, names)
        if [choice.active for choice in choices(lighter)] == [choice.active for choice in found]:
            raise Refused(f"placement={';'.join(names)} is that of the model itself: give lighter mixers")
        self._reader = Reader(lighter, "in-place")
        try:
            self._reader.fit(target)
        except Refused as why:
            raise Refused(f"super-apriel cannot draft with placement={';'.join(names)}: {why}") from why


def _windows(found: Sequence[Choice]) -> list[str]:
    """The first mixer of each layer that attends to a window."""
    if not all(choice.windowed for choice in found):
        raise Refused(
            f"no mixer attends to a window in some layers: give super-apriel placement=NAMES, of "
            f"{', '.join(found[0].mixers)}"
        )
    return [choice.windowed[0] for choice in found]
