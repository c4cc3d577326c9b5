"""What rows bring along that were asked for together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.accept._base import ArgmaxRule, ProbingRule, Rule
from truedraft.chance import Chance
from truedraft.drafters._base import Drafter
from truedraft.sampling import History, Laws
from truedraft.stats import Pass
from truedraft.stopping import Stops
from truedraft.tree import Prompt, Row


@dataclass(eq=False)
class Request:
    """Rows of one call, and how their tokens are drafted, chosen and ended; other requests may run beside it.

    rows: all of them, in the order of the call; `Row.index` is the place of each.
    prompts: what each begins with.
    passes: those that it took part in, as far as it has run.
    """

    rows: Sequence[Row]
    prompts: Sequence[Prompt]
    drafter: Drafter
    rule: Rule
    laws: Laws
    stops: Stops
    chance: Chance
    history: History
    passes: list[Pass] = field(default_factory=list, init=False)
    argmax: ArgmaxRule | None = field(init=False)  # the rule, if it may decide all nodes at once
    probing: ProbingRule | None = field(init=False)  # the rule, if it adds probes

    def __post_init__(self) -> None:
        self.argmax = self.rule if isinstance(self.rule, ArgmaxRule) else None
        self.probing = self.rule if isinstance(self.rule, ProbingRule) else None
        for row in self.rows:
            row.request = self

    @property
    def steps(self) -> int:
        """Tokens that one of its rows may still emit, at most."""
        return max(row.room - row.step for row in self.rows)
