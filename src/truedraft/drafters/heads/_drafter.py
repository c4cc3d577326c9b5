"""Base classes of drafters with a head: loading, features, trees."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from os import PathLike
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from truedraft.card import method_name, shown
from truedraft.drafters._base import Drafter, usual_seconds
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._candidates import DraftVocabulary, candidates
from truedraft.drafters._growing import GrowingDrafter, GrowingTree, laws_of
from truedraft.drafters._learned import Learner
from truedraft.drafters.heads._checkpoint import Format, read_head
from truedraft.drafters.heads._head import Head, LearnedHead, check_target
from truedraft.drafters.heads._quantize import check_copies, copies_of
from truedraft.drafters.heads._reader import HeadReader
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Draws, Row, Scores, Taps

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
        self._head = found.placed(target.device, target.dtype)
        self._vocabulary = self._head.draft_vocabulary
        self.needs = Taps(self._head.layers)
        int8 = copies_of(self.quantize)
        self._reader = self.reads(self._head, int8)
        check_copies(self._name, self.quantize, int8)

    @abstractmethod
    def opened(self, model: PreTrainedModel) -> LearnedHead:
        """The head for a target, where none was given.

        Raises:
            Refused: there is none, or it is not for this target.
        """

    @property
    def notes(self) -> list[str]:
        """Which layers a checkpoint of another project is taken to mean."""
        record = self.head.record()
        if "source" not in record:
            return []
        layers = ", ".join("the last one after the final norm" if k == -1 else str(k) for k in record["layers"])
        return [
            f"the head of {self._name} is in the format of {record['source']}: it reads the target's layers {layers} "
            f"(by that format's convention: {record['convention']})"
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

    def opened(self, model: PreTrainedModel) -> LearnedHead:
        return read_head(self.learner.name, self.model, self.formats, model, self.rebuilt)

    @staticmethod
    @abstractmethod
    def rebuilt(record: dict[str, Any], model: PreTrainedModel) -> LearnedHead:
        """The untrained head of a record, see `LearnedHead.record`."""


class HeadDrafter(LearnedDrafter, GrowingDrafter):
    """A drafter with an autoregressive head. Fields of every subclass: those of `LearnedDrafter`."""

    kind: ClassVar[Any] = Head
    reads: ClassVar[Any] = HeadReader

    @property
    def vocabulary(self) -> DraftVocabulary:
        return self._vocabulary

    def finished(self, growing: GrowingTree) -> DraftTree:
        tree = self.drafted(growing)
        return tree if tree.dist is not None else self._calibration.proposed(growing.row, tree)

    def drafted(self, growing: GrowingTree) -> DraftTree:
        """The draft to verify, with the head's probabilities as confidence."""
        return super().finished(growing)


class ConfidenceTree(HeadDrafter):
    """A head's dynamic trees (EAGLE-2): nodes in the order of the probability of their paths, by the head's
    probabilities, calibrated.

    Under the cost control a draft ends where another level would not pay, by the measured seconds of levels and passes.
    At each level the `top_k` likeliest nodes are expanded, each by its `top_k` likeliest tokens; of all, the `nodes`
    likeliest are drafted. Under `seeded` the probabilities are those by the target's own noise, see
    `_candidates.candidates`.

    Fields of every subclass: model, quantize, nodes, depth, top_k, drawn.

    drawn: for rules that verify drafts against the distribution that they were drawn from, whether the draft is a chain
        drawn from the head.
    """

    nodes: int
    depth: int
    top_k: int
    drawn: bool

    _of_level = 0.0  # seconds of a level after the first; a moving average

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return not self.drawn

    @property
    def width(self) -> int:
        return max(self.nodes, self.depth)

    @property
    def levels(self) -> int:
        return self.depth

    @property
    def draws(self) -> Draws:
        return "one" if self.drawn else "certain"

    def room(self, budget: int) -> int:
        return self.depth * max(self.top_k, budget) if budget > 0 else 0

    def continues(self, growing: GrowingTree, rows: int) -> bool:
        """Whether the next level adds more tokens per second than the pass has with the draft so far.

        Nodes whose children would not be worth their share of the verifying pass are not expanded. The rate of
        acceptance of the next level is taken to be the mean of those of the levels before.
        """
        if self.pass_cost is None or not growing.score or self._is_drawn(growing.row):
            return True
        node, level = self.pass_cost.node, self._of_level / rows
        depth = growing.depth[growing.frontier[0]]
        tokens, seconds = 1.0, self.pass_cost.plain / rows + depth * level
        for score in sorted(growing.score.values(), reverse=True)[: min(self.nodes, growing.budget)]:
            if score * seconds <= tokens * node:
                break
            tokens, seconds = tokens + score, seconds + node
        goodput = tokens / seconds
        mean = min(sum(growing.score[n] for n in growing.frontier), 1.0) ** (1 / depth)
        growing.frontier = [n for n in growing.frontier if mean * growing.score[n] > goodput * node]
        return mean * sum(growing.score[n] for n in growing.frontier) > goodput * (level + node)

    def _level(self, active: Sequence[GrowingTree]) -> None:
        begins = any(tree.frontier == [tree.root] for tree in active)
        start = time.perf_counter()
        super()._level(active)
        seconds = time.perf_counter() - start
        if begins:  # it reads more tokens than later levels, and bounds their time where these were interrupted
            self._of_level = min(self._of_level, seconds)
        else:
            self._of_level = usual_seconds(self._of_level, seconds)

    def laws(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """The same, over the draft vocabulary alone where that suffices."""
        if self._vocabulary.suffices(rows) and not any(map(self._is_drawn, rows)):
            return laws_of(rows, drafts, logits)
        return super().laws(rows, drafts, logits)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        if self._is_drawn(growing.row):
            (node,), (law,) = nodes, laws
            growing.end_level(growing.add(node, self.chosen(growing, node, law), law))
            return
        most, after = min(growing.budget, self.nodes), [growing.depth[node] for node in nodes]
        proposed = [
            (node, token, chance)
            for node, some in zip(
                nodes,
                candidates(self, growing.row, laws, after, min(self.top_k, most), self._vocabulary),
                strict=True,
            )
            for token, chance in some
        ]
        chances = self._calibration.settled(growing.row, (1.0, *(chance for *_, chance in proposed)))[1:]
        children = [
            (growing.score.get(node, 1.0) * settled, node, token, chance)
            for (node, token, chance), settled in zip(proposed, chances, strict=True)
        ]
        least = sorted(growing.score.values(), reverse=True)[most - 1 : most]
        added = []
        for value, node, token, chance in sorted(children, key=lambda child: -child[0])[:most]:
            if not least or value > least[0]:
                (child,) = growing.add(node, [token])
                growing.score[child], growing.chance[child] = value, chance
                added.append(child)
        growing.end_level(added[: self.top_k])

    def _is_drawn(self, row: Row) -> bool:
        return self.drawn and self.preferred(row) == "law"

    def drafted(self, growing: GrowingTree) -> DraftTree:
        if self._is_drawn(growing.row):
            return growing.tree("one")
        best = sorted(growing.score, key=lambda node: (-growing.score[node], node))[: min(self.nodes, growing.budget)]
        tree = growing.tree("certain", best)
        return tree.replaced(confidence=(1.0, *(growing.chance[node] for node in best)))
