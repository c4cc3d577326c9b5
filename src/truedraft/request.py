"""A request: rows of one call, with the parts that draft, choose and end their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.accept._base import ArgmaxRule, ProbingRule, Rule, extra_probes
from truedraft.chance import Chance
from truedraft.drafters._base import Drafter
from truedraft.logprobs import PromptScores
from truedraft.sampling import History, Laws
from truedraft.stats import Pass
from truedraft.stopping import Stops
from truedraft.tree import Prompt, Row


@dataclass(eq=False)
class Request:
    """Rows of one call, and the parts that decide their tokens. An engine runs several requests in one batch.

    rows: in the order of the call: `rows[i].index == i`.
    prompts: one per row.
    drafter, rule: what proposes drafts, and what accepts them.
    laws: the logits processors.
    stops: the stopping criteria.
    chance: the source of random numbers.
    history: padded token ids of all rows, for processors and criteria.
    prompt_scores: receives the logits of the prompt of its only row; None where they are not asked for.
    reach: most positions that a pass writes behind the tokens of a row.
    admitted: its place in the order in which the requests of an engine were admitted.
    passes: the passes that its rows took part in, so far.
    cached_tokens: prompt tokens whose keys and values were stored by an earlier request.
    error: the exception that ended it; None where there was none.
    """

    rows: Sequence[Row]
    prompts: Sequence[Prompt]
    drafter: Drafter
    rule: Rule
    laws: Laws
    stops: Stops
    chance: Chance
    history: History
    prompt_scores: PromptScores | None = None
    reach: int = field(init=False)
    admitted: int = field(default=-1, init=False)
    passes: list[Pass] = field(default_factory=list, init=False)
    cached_tokens: int = field(default=0, init=False)
    argmax: ArgmaxRule | None = field(init=False)  # the rule, if it may decide all nodes at once
    probing: ProbingRule | None = field(init=False)  # the rule, if it adds probes
    error: Exception | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.argmax = self.rule if isinstance(self.rule, ArgmaxRule) else None
        self.reach = self.drafter.width + extra_probes(self.rule, self.drafter.width)
        self.probing = self.rule if isinstance(self.rule, ProbingRule) else None
        for row in self.rows:
            row.request = self

    def check(self) -> None:
        """Raise `error`, if there is one, and clear it."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # breaks the reference cycle

    def of_row(self, place: int) -> Request:
        """A request for one of its rows alone, with the same parts."""
        return Request(
            [self.rows[place]], [self.prompts[place]], self.drafter, self.rule, self.laws, self.stops, self.chance,
            self.history,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """Most tokens that any of its rows may still emit."""
        return max(row.room - row.step for row in self.rows)
