"""SpecDec++: a draft model whose drafts end where a trained head expects that one of their tokens is rejected.

Huang, Guo and Wang, "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", COLM 2025 (arXiv
2405.19715). The head reads the draft model's last hidden state at each drafted token and estimates a, the probability
that this token is accepted if those before it are. A pass of the draft model reads the last token, which gives its a,
and draws the next one; the draft ends once 1 - a_1 a_2 ... exceeds a threshold. Whether a token is drafted depends on
those before it alone, and once it is, it is verified, so that drawn drafts stay exact.

The paper proves that a threshold is optimal and finds one by search, 0.3 to 0.7. By default it follows from measured
costs, under controls that measure them. One more pass of the draft model takes c seconds, and its token n more in the
target's pass. It is accepted with probability s r^2: s is the product of the a so far, and r the row's rate of
acceptance, which stands for the last token, not read yet, and for the new one. With l, the row's seconds per token, the
pass pays while l s r^2 > c + n. As s never rises, no later pass pays where one does not, and to end there is optimal (a
monotone stopping problem); as l is the ratio that the policy itself attains, its seconds per token are the fewest
(renewal theory). So the threshold is 1 - (c + n) / (l r^2). Without measured costs it is 0.3.

Rejections weigh six times in the training, which lowers a: published thresholds are of such a, those by costs of
probabilities without the weight, calibrated by how often like tokens were right. It wins over a fixed length where
acceptance varies along the text; each token is a call of the draft model, where `draft-model` makes one per draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from truedraft.card import Card, knob, shown
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters._learned import other_weights, read_learnt, read_weights, with_weights
from truedraft.drafters._timed import TimedLevels
from truedraft.drafters.models._acceptance import CANNOT, LAST, AcceptanceHead, Training, hidden_size, of_other_draft
from truedraft.drafters.models._model import ContinuingModelDrafter
from truedraft.drafters.models._reader import Reader
from truedraft.errors import Refused
from truedraft.runtime.finite import check_finite
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Draws, Row, Scores

PUBLISHED = 0.3  # threshold where costs are not known: that of the release's evaluation
KEPT = 0.95  # weight that a pass keeps at each later one, in what is counted of a row


class AcceptanceReader(Reader):
    """A draft model, whose passes give the head's estimates of the drafted tokens that they read: `GrowingTree.score`
    is the paper's a, `chance` the probability without the weight of rejections."""

    head: AcceptanceHead

    @torch.no_grad()
    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        logits, states = self.expand_tapped(growing, LAST)
        read = [(tree, node) for tree in growing for node in tree.frontier]
        if any(node > tree.root for tree, node in read):
            estimates = zip(*(part.tolist() for part in self.head.chances(self.head(states))), strict=True)
            for (tree, node), (raw, chance) in zip(read, estimates, strict=True):
                if node > tree.root:
                    tree.score[node], tree.chance[node] = raw, chance
        return logits


@dataclass(slots=True)
class RowPace:
    """What a row's drafts cost and gave so far; later passes weigh more.

    seconds, tokens: of passes, drafting included, and those emitted.
    right, tried: drafted tokens that were accepted, and those whose earlier ones were; first a prior.
    length: tokens of the row at the last pass. draft: what was drafted behind them. drafting: seconds of it.
    """

    length: int
    seconds: float = 0.0
    tokens: float = 0.0
    right: float = 1.4
    tried: float = 2.0
    draft: list[int] = field(default_factory=list)
    drafting: float = 0.0

    @property
    def rate(self) -> float:
        return self.right / self.tried

    def update(self, tokens: Sequence[int], passed: float) -> None:
        """Count a pass. tokens: of the row. passed: the row's share of the seconds of the pass."""
        emitted = tokens[self.length :]
        right = 0
        while right < min(len(emitted), len(self.draft)) and emitted[right] == self.draft[right]:
            right += 1
        self.seconds = KEPT * self.seconds + passed + self.drafting
        self.tokens = KEPT * self.tokens + len(emitted)
        self.right = KEPT * self.right + right
        self.tried = KEPT * self.tried + min(right + 1, len(emitted), len(self.draft))
        self.length, self.draft, self.drafting = len(tokens), [], 0.0

    def per_token(self, plain: float) -> float:
        """Seconds per token, with one pass without drafts, of `plain` seconds, as a prior."""
        return (self.seconds + plain) / (self.tokens + 1)


@dataclass
class SpecdecPp(TimedLevels, ContinuingModelDrafter):
    card = Card(
        paper="arXiv 2405.19715 (2024)",
        idea="A smaller model drafts until a trained head expects that one of the tokens is rejected.",
        family="draft model",
        needs=("draft model", "training"),
        cannot=CANNOT,
        published="Llama 2 chat 70B by 7B: 2.04x to 2.26x, 7% to 11% more than drafts of the best fixed length.",
        also={
            "specdec++": "",
        },
    )
    learner = Training
    model: Any = None  # a model of transformers, or its name; None for the one that the head was trained for, by name
    head: Any = None  # folder of a checkpoint (`truedraft train specdec-pp:model=NAME`), or an AcceptanceHead
    threshold: float = knob(0.0, 0, 1)  # ends a draft; 0: by measured costs; published 0.3 to 0.7
    shortest: int = knob(1, 1, 256)  # tokens at least; published 2, which a given threshold has by itself
    length: int = knob(20, 1, 256)  # tokens at most; published 20

    def __post_init__(self) -> None:
        if not isinstance(self.head, str | PathLike | AcceptanceHead | None):
            raise Refused(f"specdec-pp:head={shown(self.head)}: give the folder of a checkpoint, or an AcceptanceHead")
        if self.model is None and isinstance(self.head, str | PathLike):
            self.model = read_weights(Path(self.head).expanduser(), "specdec-pp")[0]["draft"]["name"]
        super().__post_init__()
        self._reader: AcceptanceReader = AcceptanceReader(self.model)
        self._origins = list[str]()  # sentences on the models that the head was trained for, where these are others
        self.forget()

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *filter(None, self._origins)]

    def forget(self) -> None:
        self._calibration = Calibration()
        self._paces: dict[int, RowPace] = {}

    def bind(self, target: Target) -> None:
        if why := CANNOT.get(target.family):
            raise Refused(f"specdec-pp cannot draft for {type(target.model).__name__}: {why}")
        super().bind(target)
        head = self._opened(target)
        if head.hidden != (given := hidden_size(self.model)):
            raise Refused(
                f"specdec-pp: the head reads states of size {head.hidden}, and those of the draft model "
                f"{type(self.model).__name__} have {given}: give its own head"
            )
        check_finite("specdec-pp", self.head, head)
        self.reader.target.check_taps(LAST)
        self._reader.head = head.to(self.reader.target.device).eval()

    def _opened(self, target: Target) -> AcceptanceHead:
        """The head, whose checkpoint is one for models of these sizes."""
        if isinstance(self.head, AcceptanceHead):
            return self.head
        if self.head is None:
            raise Refused(
                "specdec-pp needs a head: draft='specdec-pp:model=NAME,head=FOLDER', made by `truedraft train "
                "specdec-pp:model=NAME`"
            )
        model, tokenizer = target.model, self.target_tokenizer
        config, weights = read_learnt(Path(self.head).expanduser(), "specdec-pp", model, tokenizer)
        note = other_weights(config, "specdec-pp", self.head, model, tokenizer)
        self._origins = [note, of_other_draft(self.model, config)]
        shape = config["hidden"], config["blocks"], config["weight"]
        return with_weights(lambda: AcceptanceHead(*shape), weights, "specdec-pp", self.head)

    @property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.threshold == 0

    @property
    def draws(self) -> Draws:
        return "one"

    def start(self, rows: Sequence[Row]) -> None:
        self._paces |= {id(row): RowPace(len(row.tokens)) for row in rows}
        super().start(rows)

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        if len(growing.tokens) - 1 - growing.root < self.shortest:
            return True
        read = range(growing.root + 1, len(growing.tokens) - 1)
        if self.threshold or self.pass_cost is None:
            accepted = math.prod(growing.score[node] for node in read)
            return 1 - accepted <= (self.threshold or PUBLISHED)
        chances = (1.0, *(growing.chance[node] for node in read))
        return 1 - math.prod(self._calibration.settled(growing.row, chances)) <= self._by_costs(growing, rows, active)

    def _by_costs(self, growing: GrowingTree, rows: int, active: int) -> float:
        """The threshold above which a further token costs more than it saves."""
        assert self.pass_cost is not None
        pace = self._paces[id(growing.row)]
        saved = pace.per_token(self.pass_cost.plain / rows) * pace.rate**2
        return 1 - (self._of_level / active + self.pass_cost.node) / max(saved, 1e-12)

    def _level(self, active: Sequence[GrowingTree]) -> None:
        super()._level(active)
        for growing in active:
            self._paces[id(growing.row)].drafting += self._of_level / len(active)

    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        (node,), (law,) = nodes, laws
        growing.end_level(growing.add(node, self.chosen(growing, node, law), law))

    def finished(self, growing: GrowingTree) -> DraftTree:
        tree, pace = super().finished(growing), self._paces[id(growing.row)]
        nodes = range(growing.root + 1, len(growing.tokens))
        if not growing.after:
            pace.draft = growing.tokens[growing.root + 1 :]
        if tree.dist is not None:
            return tree
        tree = tree.replaced(confidence=(1.0, *(growing.chance.get(node, pace.rate) for node in nodes)))
        return self._calibration.proposed(growing.row, tree, growing.after)

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        self._calibration.update(rows)
        cost = self.pass_cost
        for row, tree in zip(rows, trees, strict=True):
            passed = 0.0 if cost is None else cost.plain / len(rows) + cost.node * tree.drafted
            self._paces[id(row)].update(row.tokens, passed)

    def end(self, row: Row) -> None:
        super().end(row)
        self._calibration.end(row)
        self._paces.pop(id(row), None)
