"""Where a row ends: the stopping criteria that `transformers` built, asked after every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.generation import stopping_criteria as sc
from transformers.generation.stopping_criteria import StoppingCriteriaList

from truedraft.sampling import History, Laws
from truedraft.tree import Row

ROWWISE = {sc.MaxLengthCriteria, sc.MaxTimeCriteria, sc.EosTokenCriteria, sc.StopStringCriteria}
ALIKE = {sc.MaxLengthCriteria, sc.MaxTimeCriteria, sc.EosTokenCriteria}


class Stops:
    """Sets `row.ended` exactly after the token where plain generate would have ended the row.

    End-of-text tokens and lengths are integers here; every other criterion is asked as it is, on its row's prefix.

    in_step: a criterion may look across rows or count its calls, or rows that ended go on until the last one has
        (what `transformers` does without an end-of-text token): rows advance together.
    """

    def __init__(self, criteria: StoppingCriteriaList, history: History, laws: Laws):
        self.history, self.laws, self.criteria = history, laws, criteria
        self.eos = {
            int(t) for c in criteria if type(c) is sc.EosTokenCriteria for t in c.eos_token_id.flatten().tolist()
        }
        lengths = [c.max_length for c in criteria if type(c) is sc.MaxLengthCriteria]
        self.steps = min(lengths) - history.length if lengths else None
        self.others = StoppingCriteriaList(
            c for c in criteria if type(c) not in (sc.EosTokenCriteria, sc.MaxLengthCriteria)
        )
        kinds = {type(c) for c in criteria}
        has_eos = any(hasattr(c, "eos_token_id") for c in criteria)
        self.strangers = sorted(k.__name__ for k in kinds - ROWWISE)
        self.keep_ended = history.ids.shape[0] > 1 and not has_eos and bool(kinds - ALIKE)
        self.in_step = bool(self.strangers) or self.keep_ended

    def __call__(self, rows: Sequence[Row]) -> None:
        """Judge `rows`, each of which has just emitted a token."""
        if self.in_step:
            step = rows[0].step
            scores = None if self.laws.scores is None else self.laws.steps(self.laws.scores)
            done = self.criteria(self.history.batch(step), scores).tolist()
            for row in rows:
                row.ended |= bool(done[row.index])
            return
        for row in rows:
            row.ended = row.tokens[-1] in self.eos or row.step == self.steps or self._asked(row)

    def _asked(self, row: Row) -> bool:
        if not self.others:
            return False
        return bool(torch.as_tensor(self.others(self.history.prefix([row]), None)).any())
