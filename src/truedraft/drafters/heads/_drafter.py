"""Base classes of drafters with a head: loading, features, trees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from os import PathLike
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from truedraft.card import method_name, shown
from truedraft.drafters._base import Drafter
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._candidates import DraftVocabulary
from truedraft.drafters._confidence import ConfidenceTree
from truedraft.drafters._growing import GrowingDrafter, GrowingTree, laws_of
from truedraft.drafters._learned import Learner
from truedraft.drafters.heads._checkpoint import Format, origin_of, read_head
from truedraft.drafters.heads._head import Head, Learned, check_target
from truedraft.drafters.heads._quantize import check_copies, copies_of
from truedraft.drafters.heads._reader import HeadReader
from truedraft.errors import Refused
from truedraft.runtime.finite import check_finite
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores, Taps

SEQ2SEQ = {"encoder-decoder": "its head continues the hidden states of a decoder language model"}


class LearnedDrafter(Drafter):
    """A drafter with a head trained for its target, which reads the target's hidden states.

    Fields of every subclass: model (the folder of a checkpoint, or its name on the hub; or a head), quantize (see
    `_quantize.copies_of`).

    kind: the class of its heads. reads: the class of what runs them, a `RowReader` made from a head.
    """

    kind: ClassVar[Any]
    reads: ClassVar[Any]
    model: Any
    quantize: str

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | PathLike | self.kind | None):
            own = self.kind.__name__
            raise Refused(f"{self._name}:model={shown(self.model)}: give the folder of a checkpoint, or a {own}")
        self._head: Any = None
        self._reader: Any = None
        self.forget()

    def forget(self) -> None:
        self._calibration = Calibration()

    @property
    def _name(self) -> str:
        return method_name(self)

    def bind(self, target: Target) -> None:
        if why := self.card.cannot.get(target.family):
            raise Refused(f"{self._name} cannot draft for {type(target.model).__name__}: {why}")
        if isinstance(self.model, self.kind):
            check_target(self._name, self.model.target_sizes, target.model)
            found = self.model
        else:
            found = self.opened(target.model)
        check_finite(self._name, self.model or "its head", found)
        self._head = found.placed(target.device, target.dtype)
        self._vocabulary = self._head.draft_vocabulary
        self.needs = Taps(self._head.layers)
        int8 = copies_of(self.quantize)
        self._reader = self.reads(self._head, int8)
        check_copies(self._name, self.quantize, int8)

    @abstractmethod
    def opened(self, model: PreTrainedModel) -> Learned:
        """The head for a target, where none was given.

        Raises:
            Refused: there is none, or it is not for this target.
        """

    @property
    def notes(self) -> list[str]:
        """Also which target a checkpoint was trained for, and which layers one of another project is taken to mean."""
        record, found = self.head.record(), [*super().notes, *filter(None, [origin_of(self.head)])]
        if "source" not in record:
            return found
        layers = ", ".join("the last one after the final norm" if k == -1 else str(k) for k in record["layers"])
        return [
            *found,
            f"the head of {self._name} is in the format of {record['source']}: it reads the target's layers {layers} "
            f"(by that format's convention: {record['convention']})",
        ]

    @property
    def head(self) -> Any:
        """The head that is bound."""
        assert self._head is not None
        return self._head

    @property
    def reader(self) -> Any:
        assert self._reader is not None
        return self._reader

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self.reader.observe(rows, scores, accepted)
        self._calibration.update(rows)

    def end(self, row: Row) -> None:
        self._calibration.end(row)
        self.reader.end(row)


class TrainedDrafter(LearnedDrafter):
    """One whose heads are trained here, or read from published checkpoints.

    formats: of checkpoints, see `_checkpoint.Format`; the first that matches is read.
    """

    formats: ClassVar[Sequence[Format]]
    learner: ClassVar[type[Learner]]

    def opened(self, model: PreTrainedModel) -> Learned:
        return read_head(self.learner.name, self.model, self.formats, model, self.rebuilt, self.target_tokenizer)

    @staticmethod
    @abstractmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> Learned:
        """The untrained head of a record, see `Learned.record`."""


class HeadDrafter(LearnedDrafter, GrowingDrafter):
    """A drafter with an autoregressive head. Fields of every subclass: those of `LearnedDrafter`."""

    any_shape = True
    kind: ClassVar[Any] = Head
    reads: ClassVar[Any] = HeadReader

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._vocabulary

    def finished(self, growing: GrowingTree) -> DraftTree:
        tree = super().finished(growing)
        return tree if tree.dist is not None else self._calibration.proposed(growing.row, tree)


class HeadTree(ConfidenceTree, HeadDrafter):
    """A head's dynamic trees (EAGLE-2); see `ConfidenceTree`. Fields of every subclass: those of both.

    Distributions are computed over the draft vocabulary alone where that suffices.
    """

    def laws(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        if self._vocabulary.suffices(rows) and not any(map(self.is_drawn, rows)):
            return laws_of(rows, drafts, logits)
        return super().laws(rows, drafts, logits)
