"""What a drafter is."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar
from weakref import ReferenceType

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.card import Card
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._learned import Learner
from truedraft.stores.memory import Memory
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Draws, PreferredDrafts, Row, Scores, Taps

State = TypeVar("State")
IDLE = 0.01  # of a pass, for learning from it: what costs more is spared while no draft is wanted,
SPARED = 8  # but for one pass in so many


class PassCost(NamedTuple):
    """Seconds of a pass without drafts, and those that one drafted node adds to it."""

    plain: float
    node: float


class Bound(NamedTuple):
    """The target that a drafter was made ready for, and the size of its vocabulary."""

    target: ReferenceType[Target]
    vocabulary: int


class Drafter(ABC):
    """Guesses what the target will say next. Right guesses save passes; wrong ones change nothing.

    Subclasses are dataclasses whose fields are the method's knobs.

    needs: what it asks to see of every pass.
    takes_references: whether it copies from documents that the caller gives.
    tokenizer: of a drafter that has one of its own; it must be the target's.
    prior_confidence: how often the first token of its drafts is right, before anything is known of the text.
    autoregressive: whether every level of a draft costs a pass of a model.
    pass_cost: what passes take, where drafts have to pay for their own time; None where they need not.
    learner: how it is trained, where it has to be (`truedraft train`).
    bound: what it was last made ready for.
    alone: whether its drafts are offered as they are; those that are joined with others may not be drawn.
    """

    card: ClassVar[Card]
    needs: Taps = Taps()
    takes_references: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    prior_confidence: ClassVar[float] = 0.15
    autoregressive: bool = False
    pass_cost: PassCost | None = None
    learner: ClassVar[type[Learner] | None] = None
    bound: Bound | None = None
    alone: bool = True

    @property
    def vocab_size(self) -> int | None:
        """Token ids that it may draft, where it has a model of its own; padding at the end may differ."""
        return None

    def bind(self, target: Target) -> None:
        """Once it is known what it drafts for.

        Raises:
            Refused: it cannot draft for this target, or was not given what it needs.
        """

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Before a call: the target's tokenizer, where it is known."""

    @property
    def draws(self) -> Draws:
        """How it drafts where the rule judges drafts by the law that they were drawn from."""
        return "certain"

    def open(self) -> None:
        """Before the first rows of a call, or of an engine that no row runs in."""

    def start(self, rows: Sequence[Row]) -> None:
        """New rows, their prompts in `row.tokens`; others may be under way.

        What their tokens are chosen by is in `row.request`: the processors that the target's scores go through
        (`laws`), for drafts that are to be drawn likewise, and the noise (`chance`).
        """

    def preferred(self, row: Row) -> PreferredDrafts:
        """The drafts that serve the row's rule best.

        Only where it is "law" may a drafter draw by `chance.draw`, and say so in `dist`; what of such a draft is
        offered must not depend on what was drawn.
        """
        preferred = row.request.rule.preferred_drafts
        return "likeliest" if preferred == "law" and not self.alone else preferred

    @property
    @abstractmethod
    def width(self) -> int:
        """Nodes that a full draft has, at most."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        """A tree per row, at most `budget` nodes below each root, none deeper than `row.room - 1`.

        Deeper nodes could never be emitted; the engine cuts them off. An empty draft is a tree of the root alone.
        """

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        """Every pass as it was: all nodes with their scores, rejected ones included; the first is the prompt's.

        `row.tokens` already holds what was emitted.
        """

    def end(self, row: Row) -> None:
        """The row is finished; forget it. Nothing to do where it was ended before, or never quite started: an
        interruption may come in the midst of either."""

    def forget(self) -> None:
        """Forget what was learnt of rows that ended; none may be under way."""

    def memories(self) -> Sequence[Memory]:
        """What it keeps of what rows said, each of them all that fits."""
        return ()


class Plain(Drafter):
    """Drafts nothing: plain decoding through the same engine."""

    card = Card(paper="none", idea="One token per pass.", family="none")

    @property
    def width(self) -> int:
        return 0

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain(row.tokens[-1]) for row in rows]


class PerRow(Drafter, Generic[State]):
    """A drafter that treats every sequence by itself: a state per row, and a chain or tree from it.

    The confidence of its nodes is calibrated by what became of earlier ones (`_calibration.py`), verified or not.
    """

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._states: dict[int, State] = {}
        self._calibration = Calibration()
        self._requested = False  # for a draft, since the last pass
        self._learning = 0.0  # seconds that learning from a pass lately took
        self._spared = 0  # passes that it did not learn from

    @abstractmethod
    def begin(self, row: Row) -> State: ...

    @abstractmethod
    def draft(self, row: Row, state: State, after: Sequence[int], budget: int) -> DraftTree:
        """What follows `row.tokens` and then `after`, at most `budget` nodes; its root is the last of these tokens.

        after: tokens that another drafter has drafted already.
        """

    def learn(self, row: Row, state: State, tree: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """One row's pass as it was; see `observe`.

        logits: (nodes, V), raw.
        """

    def finish(self, row: Row, state: State) -> None:
        """The row has ended; what it said may be kept for later rows of its namespace."""

    def start(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._states[id(row)] = self.begin(row)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self._requested = any(budget)
        return [
            self._calibration.proposed(row, self.draft(row, self._states[id(row)], (), most))
            if most > 0
            else DraftTree.chain(row.tokens[-1])
            for row, most in zip(rows, budget, strict=True)
        ]

    def extend(self, row: Row, after: Sequence[int], budget: int) -> DraftTree:
        """A draft for where the row would stand after `after`; see `draft`."""
        self._requested = True
        return self._calibration.proposed(row, self.draft(row, self._states[id(row)], after, budget), after)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for row in rows:
            self._calibration.update(row)
        if type(self).learn is not PerRow.learn and self._learns():
            began = time.perf_counter()
            for row, tree, logits, reached in zip(rows, trees, scores.logits, accepted, strict=True):
                self.learn(row, self._states[id(row)], tree, logits[: len(tree)], reached)
            self._learning = moving_average(self._learning, time.perf_counter() - began)
        self._requested = False

    def _learns(self) -> bool:
        """Whether it learns from this pass; of those for which no draft was wanted, from a few only if that is dear."""
        if self._requested or self.pass_cost is None or self._learning <= IDLE * self.pass_cost.plain:
            return True
        self._spared = (self._spared + 1) % SPARED
        return self._spared == 0

    def end(self, row: Row) -> None:
        self._calibration.end(row)
        if id(row) in self._states:
            self.finish(row, self._states.pop(id(row)))


def moving_average(before: float, now: float) -> float:
    """An average of which each later value makes a fifth; the first stands for itself."""
    return 0.8 * before + 0.2 * now if before else now
