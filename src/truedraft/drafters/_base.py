"""The contract of drafters."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar
from weakref import ReferenceType

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.card import Card, lacking
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._learned import Learner
from truedraft.stores.memory import Memory
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Draws, PreferredDrafts, Row, Scores, Taps

State = TypeVar("State")
IDLE = 0.002  # of a pass: learning that costs more is skipped while no draft is requested,
SPARED = 8  # except for one pass in so many
HICCUP = 4.0  # times the usual seconds: what exceeds it is not counted


class PassCost(NamedTuple):
    """Seconds of a pass without drafts, and those that one drafted node adds to it."""

    plain: float
    node: float


class Bound(NamedTuple):
    """The target that a drafter is bound to, and the size of its vocabulary."""

    target: ReferenceType[Target]
    vocabulary: int


class Drafter(ABC):
    """Predicts the target's next tokens. Right predictions save passes; wrong ones do not change the output.

    Subclasses are dataclasses whose fields are the method's knobs.

    needs: the taps that it requires of every pass.
    takes_references: whether it copies from documents that the caller gives.
    tokenizer: its own tokenizer, if it has one; it must equal the target's, but for `own_tokens`.
    target_tokenizer: the target's, where that was given.
    own_tokens: ids of its own model that are never drafted, as that of a mask.
    prior_confidence: prior probability that the first token of a draft is accepted.
    autoregressive: whether every level of a draft costs a pass of a model.
    reads_texts: whether passes of a model read the text of a row before the first draft for it.
    adaptive: whether it ends a draft where further levels would cost more than they save, by `pass_cost`.
    overlapped: whether it drafts on while a pass runs, which may then take longer than without it.
    pass_cost: the cost of passes, where drafts have to pay for their own time; else None.
    learner: its training, if it is trained (`truedraft train`).
    bound: the target of the last `bind`.
    alone: whether its drafts are verified as they are; drafts that are joined with others must not be drawn.
    """

    card: ClassVar[Card]
    needs: Taps = Taps()
    takes_references: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    target_tokenizer: PreTrainedTokenizerBase | None = None
    own_tokens: frozenset[int] = frozenset()
    prior_confidence: ClassVar[float] = 0.15
    autoregressive: bool = False
    reads_texts: bool = False
    adaptive: bool = False
    overlapped: bool = False
    pass_cost: PassCost | None = None
    learner: ClassVar[type[Learner] | None] = None
    bound: Bound | None = None
    alone: bool = True

    @property
    def notes(self) -> list[str]:
        """Sentences for the report of a call: what it lacks of its paper, and what it was made of that a caller should
        check."""
        return lacking(self)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size of its own model, if it has one; padding at the end may differ from the target's."""
        return None

    def bind(self, target: Target) -> None:
        """Prepare it for a target.

        Raises:
            Refused: it cannot draft for this target, or a required knob is missing.
        """

    def translate(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Before `bind`: set the target's tokenizer, for a drafter that can have another one, or was trained for it."""
        self.target_tokenizer = tokenizer

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Before a call: set the target's tokenizer, if there is one."""

    @property
    def draws(self) -> Draws:
        """How its drafts are drawn for rules that verify drafts against the distribution that they were drawn from."""
        return "certain"

    def open(self) -> None:
        """Called before the first rows of a call, or of an engine without running rows."""

    def start(self, rows: Sequence[Row]) -> None:
        """Admit rows, their prompts in `row.tokens`; others may be running.

        `row.request` has what their tokens are chosen by: the logits processors (`laws`), for drafts that are drawn
        from processed distributions, and the noise (`chance`).
        """

    def preferred(self, row: Row) -> PreferredDrafts:
        """The kind of drafts that the row's rule accepts best.

        Only where it is "law" may a drafter draw by `chance.draw`, with the distributions in `dist`; which nodes of
        such a draft are verified must not depend on the tokens drawn.
        """
        preferred = row.request.rule.preferred_drafts
        return "likeliest" if preferred == "law" and not self.alone else preferred

    @property
    @abstractmethod
    def width(self) -> int:
        """Most nodes of a full draft."""

    @abstractmethod
    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        """A tree per row, at most `budget` nodes below each root, none deeper than `row.room - 1`.

        Deeper nodes could never be emitted; the engine cuts them off. An empty draft is a tree of the root alone.
        """

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        """Called after every pass with the scores of all nodes, rejected ones included; the first pass is the prompt's.

        `row.tokens` already contains the emitted tokens.
        """

    @property
    def attentive(self) -> bool:
        """Whether it has anything to observe of a pass that it did not draft for; else combinations leave it out."""
        return True

    def resumes(self, row: Row) -> bool:
        """Whether the row's text has come to a place where a draft is likelier right than the latest ones, none of
        which was worth verifying. Called before passes for which it does not draft; it must cost next to nothing."""
        return False

    def end(self, row: Row) -> None:
        """Remove a finished row. It may have been removed before, or not have been started: an interruption may occur
        during either."""

    def forget(self) -> None:
        """Discard what was learnt from earlier rows; none may be running."""

    def memories(self) -> Sequence[Memory]:
        """The memories in which it keeps the output of rows."""
        return ()


class Plain(Drafter):
    """Drafts nothing: plain decoding through the same engine."""

    card = Card(paper="none", idea="One token per pass.", family="none")

    @property
    def width(self) -> int:
        return 0

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        return [DraftTree.chain(row.tokens[-1]) for row in rows]


class Continuing(Drafter):
    """A drafter that can continue the drafts of others."""

    @abstractmethod
    def extend_each(
        self, rows: Sequence[Row], after: Sequence[Sequence[int]], budget: Sequence[int]
    ) -> list[DraftTree]:
        """For each row a draft of at most `budget` nodes after its tokens and then `after`, the drafted ones; its root
        is the last of these tokens.

        rows: all rows of the pass, some with a budget of 0.
        """


class PerRow(Continuing, Generic[State]):
    """A drafter that treats every sequence by itself: a state per row, and a chain or tree from it.

    The confidence of its nodes is calibrated by how often earlier ones were right (`_calibration.py`), verified or not.
    """

    _observes: ClassVar[bool]  # whether it learns from passes,
    _listens: ClassVar[bool]  # or does anything else after each of them

    def __init_subclass__(cls) -> None:
        cls._observes = cls.learn is not PerRow.learn or cls.learn_all is not PerRow.learn_all
        cls._listens = cls._observes or cls.observe is not PerRow.observe

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._states: dict[int, State] = {}
        self._calibration = Calibration()
        self._requested = False  # whether a draft was requested since the last pass
        self._learning = 0.0  # moving average of the seconds of learning from a pass
        self._spared = 0  # passes that it did not learn from

    @abstractmethod
    def begin(self, row: Row) -> State: ...

    @abstractmethod
    def draft(self, row: Row, state: State, after: Sequence[int], budget: int) -> DraftTree:
        """A draft of at most `budget` nodes after `row.tokens` and then `after`; its root is the last of these tokens.

        after: tokens that another drafter has drafted.
        """

    def learn(self, row: Row, state: State, tree: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """One row's part of `observe`.

        logits: (nodes, V), raw.
        """

    def learn_all(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        """`learn` for each row; for a drafter that learns faster from all of them together."""
        for row, tree, logits, reached in zip(rows, trees, scores.logits, accepted, strict=True):
            self.learn(row, self._states[id(row)], tree, logits[: len(tree)], reached)

    def finish(self, row: Row, state: State) -> None:
        """The row has ended; its output may be kept for later rows of its namespace."""

    def start(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._states[id(row)] = self.begin(row)

    def resumes(self, row: Row) -> bool:
        state = self._states.get(id(row))
        return state is not None and self.finds(row, state)

    def finds(self, row: Row, state: State) -> bool:
        """Whether the row has come to something to draft; see `resumes`."""
        return False

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self._requested = any(budget)
        return [
            self._calibration.proposed(row, self.draft(row, self._states[id(row)], (), most))
            if most > 0
            else DraftTree.chain(row.tokens[-1])
            for row, most in zip(rows, budget, strict=True)
        ]

    def extend(self, row: Row, after: Sequence[int], budget: int) -> DraftTree:
        """A draft that continues the row after the drafted tokens `after`; see `draft`."""
        self._requested = True
        return self._calibration.proposed(row, self.draft(row, self._states[id(row)], after, budget), after)

    def extend_each(
        self, rows: Sequence[Row], after: Sequence[Sequence[int]], budget: Sequence[int]
    ) -> list[DraftTree]:
        return [
            self.extend(row, drafted, most) if most > 0 else DraftTree.chain((drafted or row.tokens)[-1])
            for row, drafted, most in zip(rows, after, budget, strict=True)
        ]

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        if self._calibration.follows:
            self._calibration.update(rows)
        if self._observes and self._learns():
            began = time.perf_counter()
            self.learn_all(rows, trees, scores, accepted)
            self._learning = moving_average(self._learning, time.perf_counter() - began)
        self._requested = False

    @property
    def attentive(self) -> bool:
        return self._listens or self._requested or self._calibration.follows

    def _learns(self) -> bool:
        """Whether it learns from this pass; if learning is expensive, only from some passes without a draft."""
        if self._requested or self.pass_cost is None or self._learning <= IDLE * self.pass_cost.plain:
            return True
        self._spared = (self._spared + 1) % SPARED
        return self._spared == 0

    def end(self, row: Row) -> None:
        self._calibration.end(row)
        if id(row) in self._states:
            self.finish(row, self._states.pop(id(row)))


def moving_average(before: float, now: float) -> float:
    """An exponential moving average with weight 0.2 for the new value; the first value initialises it."""
    return 0.8 * before + 0.2 * now if before else now


def usual_seconds(before: float, now: float) -> float:
    """A moving average of seconds, in which outliers are limited."""
    return moving_average(before, min(now, HICCUP * before) if before else now)
