"""The end of rows: the stopping criteria that `transformers` built, evaluated after every token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers.generation import stopping_criteria as sc
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from truedraft.sampling import History, Laws
from truedraft.tree import Row

ROWWISE = {sc.MaxLengthCriteria, sc.MaxTimeCriteria, sc.EosTokenCriteria, sc.StopStringCriteria}
ALIKE = {sc.MaxLengthCriteria, sc.MaxTimeCriteria, sc.EosTokenCriteria}


class RowwiseCriterion(StoppingCriteria):
    """A stopping criterion that decides about a row by that row's ids alone.

    Derive from it to declare so. It is called for one row at a time, after each of its tokens, in their order, and may
    be called again after the last; it may keep state between these calls. Rows with such criteria do not advance in
    lockstep.
    """


class Stops:
    """Sets `row.end` exactly after the token where plain generate would have ended the row.

    End-of-text tokens and lengths are integers here; other criteria are called as they are, on their row's prefix.

    steps: tokens that a row may emit.
    lockstep: a criterion may look across rows or count its calls, or ended rows are continued until the last one ends
        (as in `transformers` without an end-of-text token): rows advance together and leave together.
    pads: ended rows are continued with padding, as in `transformers` where there is an end-of-text token.
    plain: there are no criteria but end-of-text tokens and lengths, and rows end by themselves.
    """

    def __init__(self, criteria: StoppingCriteriaList, history: History, laws: Laws):
        self.history, self.laws, self.criteria = history, laws, criteria
        self.eos = ends_of(criteria)
        self.steps = longest(criteria) - history.length
        self.others = StoppingCriteriaList(
            c for c in criteria if type(c) not in (sc.EosTokenCriteria, sc.MaxLengthCriteria)
        )
        kinds = {type(c) for c in criteria}
        unknown = [kind for kind in kinds - ROWWISE if not issubclass(kind, RowwiseCriterion)]
        self.unknown_processors = sorted(kind.__name__ for kind in unknown)
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        unpadded = history.ids.shape[0] > 1 and not self.pads and bool(kinds - ALIKE)
        self.lockstep = laws.lockstep or bool(self.unknown_processors) or unpadded
        self.plain = not self.lockstep and not self.others

    def __call__(self, rows: Sequence[Row]) -> None:
        """Set the end of `rows` that end with the token just emitted; in lockstep, ended rows stay ended."""
        if self.lockstep:
            scores = None if self.laws.scores is None else tuple(self.laws.scores)
            ended = self.criteria(self.history.batch(rows[0].step), scores).tolist()
        else:
            ended = [self.met(row) or row.tokens[-1] in self.eos or row.step == self.steps for row in rows]
        for row, end in zip(rows, ended, strict=True):
            if end and row.end is None:
                row.end = len(row.tokens)

    def emit(self, row: Row, tokens: Sequence[int]) -> int:
        """Append tokens to a row, up to the first that ends it, where criteria are `plain`; returns how many."""
        most = min(len(tokens), self.steps - row.step)
        if not self.eos.isdisjoint(tokens):
            most = min(most, 1 + next(i for i, token in enumerate(tokens) if token in self.eos))
        row.tokens += tokens[:most]
        if row.end is None and (row.step == self.steps or row.tokens[-1] in self.eos):
            row.end = len(row.tokens)
        return most

    def met(self, row: Row) -> bool:
        """Whether a criterion besides lengths and end-of-text tokens ends a row after its last token."""
        return bool(self.others) and bool(torch.as_tensor(self.others(self.history.prefix([row]), None)).any())


def ends_of(criteria: StoppingCriteriaList) -> frozenset[int]:
    """The tokens that end a row."""
    found = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is sc.EosTokenCriteria]
    return frozenset(int(token) for tokens in found for token in tokens)


def longest(criteria: StoppingCriteriaList) -> int:
    """The length, prompt included, at which every row has ended: the first that reaches a limit, perhaps a float."""
    return math.ceil(min(c.max_length for c in criteria if isinstance(c, sc.MaxLengthCriteria)))
