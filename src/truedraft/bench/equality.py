"""Equality of generated texts with the reference of each way of generating.

The reference is plain `transformers` generate. In dtypes below fp32, where two ways of computing one forward choose
differently at near-ties, that of accelerated models is the one that their guarantee names, plain decoding through the
same pass; their differences from `transformers` are then classified as by the audit (`audit/tokens.py`); those of
diffusion models are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from truedraft.accelerated import Accelerated
from truedraft.audit.precise import Precise
from truedraft.audit.tokens import DivergenceKind, explain
from truedraft.bench.sides import Side
from truedraft.bench.workloads import Item

Call = tuple[Sequence[Item], dict[str, Any], int]  # its items, their ids and mask, and the index of the first


def differences(
    sides: Sequence[Side],
    texts: Sequence[Sequence[Tensor]],
    calls: Sequence[Call],
    settings: dict[str, Any],
    progress: Callable[[str], None],
) -> tuple[list[str | None], list[dict[str, int] | None]]:
    """The first difference of each side from its reference, and its differences from the first side by kind."""
    plain = next((k for k, side in enumerate(sides) if side.coarse and side.undrafted), 0)
    differs: list[str | None] = []
    against_plain: list[dict[str, int] | None] = []
    kinds: dict[str, int] = {}
    for k, side in enumerate(sides):
        of = plain if side.coarse else 0
        found = (_difference(out, texts[of][n], calls[n][2]) for n, out in enumerate(texts[k]))
        differs.append(next(filter(None, found), None))
        against_plain.append(None)
        if side.coarse and plain:
            if k == plain or differs[k] is not None:
                progress(f"differences of {side.name} from transformers")
                kinds = _kinds(side, texts[k], texts[0], calls, settings)
            against_plain[k] = kinds
            if kinds.get("bug"):
                differs[k] = differs[k] or f"a bug: run `truedraft audit` ({kinds['bug']} texts)"
    return differs, against_plain


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
        return {kind: sum(_rows_apart(texts[n], expected[n]) for n in unequal)}
    kinds: list[DivergenceKind] = []
    if unequal:
        precise = Precise(side.fast.model)
        for n in unequal:
            kinds += explain(side.fast, precise, calls[n][1], settings["max_new_tokens"])
    return {kind: kinds.count(kind) for kind in ("tie", "numerics", "bug")}


def _rows_apart(out: Tensor, expected: Tensor) -> int:
    width = max(out.shape[1], expected.shape[1])
    a, b = (torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1) for t in (out, expected))
    return int((a != b).any(-1).sum())


def _difference(out: Tensor, expected: Tensor, first: int) -> str | None:
    if torch.equal(out, expected):
        return None
    shared = min(out.shape[1], expected.shape[1])
    unequal = (out[:, :shared] != expected[:, :shared]).nonzero()
    if not len(unequal):
        return f"{out.shape[1]} tokens instead of {expected.shape[1]}"
    row, at = unequal[0].tolist()
    return f"prompt {first + row}, new token {at}: {int(out[row, at])} instead of {int(expected[row, at])}"
