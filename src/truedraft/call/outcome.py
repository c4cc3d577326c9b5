"""The output of a call, from its rows when it ends or is interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from truedraft.sampling import History, Laws
from truedraft.stats import Pass
from truedraft.tree import Row


def cut(rows: Sequence[Row], passes: Sequence[Pass], lockstep: bool) -> None:
    """Remove from the rows the tokens of a pass that was not completed.

    lockstep: ended rows were padded to the length of the others.
    """
    emitted = [0] * len(rows)
    for emission in (e for done in passes for e in done.emitted):
        emitted[emission.row] += len(emission.tokens)
    for row in rows:
        del row.tokens[row.prompt + (max(emitted) if lockstep else emitted[row.index]) :]


def output(kind: type[Any], rows: Sequence[Row], history: History, laws: Laws, returns: bool) -> Any:
    """What `model.generate` returns: ids, or with `returns` an output of sequences, scores and logits.

    kind: of that output, the target's `output_class`.
    """
    steps = max(row.step for row in rows)
    sequences: Any = history.batch(steps).clone()
    if not returns:
        return sequences
    scores, logits = (None if kept is None else tuple(kept[:steps]) for kept in (laws.scores, laws.logits))
    return kind(sequences=sequences, scores=scores, logits=logits)
