"""Base class of drafters with a diffusion language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from truedraft.card import method_name
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._candidates import DraftVocabulary
from truedraft.drafters._positions import PositionsDrafter
from truedraft.drafters.models._mask_reader import MaskReader
from truedraft.drafters.models._reader import loaded
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores

SEQ2SEQ = {"encoder-decoder": "a diffusion model continues a text, and reads no source"}


class MaskDrafter(PositionsDrafter):
    """A drafter with a diffusion model that has the target's tokenizer and a mask: one pass of it over the row and
    masks behind it predicts all positions of a draft.

    Fields of every subclass: model (a model of transformers, or the name of one: a folder, an embedded model, one on
    the hub), and those of `PositionsDrafter`.
    """

    reads_texts = True
    model: Any

    def __post_init__(self) -> None:
        self.model, self.tokenizer = loaded(self.model)
        self.reader = MaskReader(self.model)
        self.forget()

    def forget(self) -> None:
        self._calibration = Calibration()

    @property
    def own_tokens(self) -> frozenset[int]:  # type: ignore[override]
        return frozenset() if self.model is None else frozenset([self.reader.layout.mask])

    @property
    def vocab_size(self) -> int | None:
        return None if self.model is None else self.model.config.get_text_config(decoder=True).vocab_size

    def bind(self, target: Target) -> None:
        name = method_name(self)
        if why := self.card.cannot.get(target.family):
            raise Refused(f"{name} cannot draft for {type(target.model).__name__}: {why}")
        if self.model is None:
            raise Refused(f"{name} needs a diffusion model: draft='{name}:model=NAME'")
        self.reader.fit(target)
        self._vocabulary = DraftVocabulary(target.vocabulary)

    def start(self, rows: Sequence[Row]) -> None:
        self.reader.start(rows, self.depth)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        drafts = any(budget) and self.reader.reserve()
        return super().propose(rows, budget if drafts else [0] * len(rows))

    def deepest(self, row: Row) -> int:
        return min(self.depth, self.reader.reach(row))

    def filled(self, rows: Sequence[Row], depths: Sequence[int]) -> Tensor:
        return self.reader.filled(rows, depths)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self._calibration.update(rows)

    def end(self, row: Row) -> None:
        self._calibration.end(row)
        self.reader.end(row)
