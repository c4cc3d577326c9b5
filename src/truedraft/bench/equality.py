"""Equality of generated texts with the reference of each way of generating.

The reference is plain `transformers` generate. In dtypes below fp32, where two ways of computing one forward choose
differently at near-ties, that of accelerated models is the one that their guarantee names, plain decoding through the
same pass; their differences from `transformers` are then classified as by the audit (`audit/tokens.py`); those of
diffusion models are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from truedraft.accelerated import Accelerated
from truedraft.audit.precise import Precise
from truedraft.audit.tokens import DivergenceKind, explain
from truedraft.bench.sides import Side
from truedraft.bench.workloads import Item

Call = tuple[Sequence[Item], dict[str, Any], int]  # its items, their ids and mask, and the index of the first


@dataclass(frozen=True)
class Equality:
    """How the texts of a way of generating compare with those of others.

    differs: the first difference from its reference, or a bug; None where there is none.
    texts: that were compared. agreement: the share of tokens that are those of the model alone at the same place.
    as_undrafted: whether all of them are those of the same engine without drafts; None where there is no such way, or
        this is none of the engine.
    apart: texts that differ from those of the model alone, by kind; empty where none does. They are classified (tie,
        numerics, bug) where the reference is another way than the model alone; under a view they are lossy.
    """

    differs: str | None
    texts: int
    agreement: float = 1.0
    as_undrafted: bool | None = None
    apart: dict[str, int] = field(default_factory=dict)


def equalities(
    sides: Sequence[Side],
    texts: Sequence[Sequence[Tensor]],
    calls: Sequence[Call],
    settings: dict[str, Any],
    progress: Callable[[str], None],
) -> list[Equality]:
    """The equality of each way, the first of which is the model alone."""
    plain = next((k for k, side in enumerate(sides) if side.undrafted), None)
    found: list[Equality] = []
    known: dict[str, int] = {}  # of all ways that have the texts of the engine without drafts
    for k, side in enumerate(sides):
        coarse = side.coarse and plain is not None
        reference = texts[plain if coarse and plain is not None else 0]
        first = (_difference(out, reference[n], calls[n][2]) for n, out in enumerate(texts[k]))
        differs = next(filter(None, first), None)
        as_undrafted = None
        if plain is not None and side.fast is not None and not side.lossy:
            as_undrafted = not _count(texts[k], texts[plain])
        apart = _count(texts[k], texts[0])
        kinds = {"unclassified": apart} if apart else {}
        if side.lossy:
            differs, kinds = None, {"lossy": apart} if apart else {}
        elif coarse:
            if k == plain or differs is not None:
                progress(f"differences of {side.name} from the model alone")
                known = _kinds(side, texts[k], texts[0], calls, settings)
            kinds = known
            if kinds.get("bug"):
                differs = differs or f"a bug: run `truedraft audit` ({kinds['bug']} texts)"
        agreement = _agreement(texts[k], texts[0])
        found.append(Equality(differs, sum(map(len, texts[k])), agreement, as_undrafted, kinds))
    return found


def _kinds(
    side: Side,
    texts: Sequence[Tensor],
    expected: Sequence[Tensor],
    calls: Sequence[Call],
    settings: dict[str, Any],
) -> dict[str, int]:
    """How many rows differ from the expected ones, by kind."""
    unequal = [n for n, out in enumerate(texts) if _difference(out, expected[n], 0)]
    if settings["do_sample"] or not isinstance(side.fast, Accelerated):
        kind = "sampled" if settings["do_sample"] else "unclassified"
        return {kind: _count(texts, expected)} if unequal else {}
    kinds: list[DivergenceKind] = []
    if unequal:
        precise = Precise(side.fast.model)
        for n in unequal:
            kinds += explain(side.fast, precise, calls[n][1], settings["max_new_tokens"])
    return {kind: kinds.count(kind) for kind in ("tie", "numerics", "bug") if kind in kinds}


def _count(texts: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """The rows that differ from the expected ones."""
    return sum(_rows_apart(one, other) for one, other in zip(texts, expected, strict=True))


def _rows_apart(out: Tensor, expected: Tensor) -> int:
    return int((~_equal(out, expected)).any(-1).sum())


def _agreement(texts: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    equal = [_equal(one, other).flatten() for one, other in zip(texts, expected, strict=True)]
    return float(torch.cat(equal).float().mean())


def _equal(out: Tensor, expected: Tensor) -> Tensor:
    """(rows, longest) whether a token is the expected one; where one text has ended it is not."""
    width = max(out.shape[1], expected.shape[1])
    a, b = (torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in (out, expected))
    return a == b


def _difference(out: Tensor, expected: Tensor, first: int) -> str | None:
    if torch.equal(out, expected):
        return None
    shared = min(out.shape[1], expected.shape[1])
    unequal = (out[:, :shared] != expected[:, :shared]).nonzero()
    if not len(unequal):
        return f"{out.shape[1]} tokens instead of {expected.shape[1]}"
    row, at = unequal[0].tolist()
    return f"prompt {first + row}, new token {at}: {int(out[row, at])} instead of {int(expected[row, at])}"
