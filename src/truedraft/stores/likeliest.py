"""The largest scores of every row."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p, cast

import torch
from torch import Tensor

from truedraft.stores._native import library

MOST = 16  # largest `count` of the compiled form


def lines(scores: Tensor) -> tuple[Tensor, int, int, int] | None:
    """What compiled code reads of scores (..., width): their memory, with rows, width and the stride of rows.

    None where it cannot read them.
    """
    if library() is None or scores.dtype != torch.float32 or not scores.is_cpu or scores.stride(-1) != 1:
        return None
    width = scores.shape[-1]
    if scores.is_contiguous():
        return scores, scores.numel() // width, width, width
    flat = scores.flatten(0, -2)
    return flat, len(flat), width, flat.stride(0)


def largest(scores: Tensor) -> list:
    """The index of the first largest of the scores (..., width), -1 where any of them is NaN; in nested lists."""
    if (found := lines(scores)) is None:
        best, places = scores.max(-1)
        return places.masked_fill_(best.isnan(), -1).tolist()
    flat, rows, width, stride = found
    out = (c_int32 * rows)()
    library().truedraft_largest(flat.data_ptr(), rows, width, stride, out)  # type: ignore[union-attr]
    if scores.dim() == 2:
        return out[:]
    each = scores.shape[1]
    return [out[at : at + each] for at in range(0, rows, each)]


def likeliest(scores: Tensor, count: int) -> list[list[int]]:
    """The indices of the `count` largest scores of each row of (rows, width), the largest first.

    Fewer where a row has fewer possible tokens: scores of -inf and NaN are left out.
    """
    count = max(min(count, scores.shape[-1]), 0)
    lib = library()
    if lib is None or scores.dtype != torch.float32 or scores.device.type != "cpu" or not 1 <= count <= MOST:
        best, at = scores.masked_fill(scores.isnan(), -torch.inf).topk(count, dim=-1)
        return [row[: int(n)] for row, n in zip(at.tolist(), (best > -torch.inf).sum(-1), strict=True)]
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    rows, width = scores.shape
    out = (c_int32 * (rows * count))()
    lib.truedraft_likeliest(scores.data_ptr(), rows, width, scores.stride(0), count, out)
    found = out[:]
    if -1 in found:
        return [[i for i in found[at : at + count] if i >= 0] for at in range(0, rows * count, count)]
    return [found[at : at + count] for at in range(0, rows * count, count)]


def likeliest_with_chances(logits: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """The `count` most probable indices of each row of logits (rows, width), the likeliest first, and their
    probabilities.

    Fewer where fewer are possible: a row with NaN has none.
    """
    count = max(min(count, logits.shape[-1]), 0)
    if not 1 <= count <= MOST or (found := lines(logits)) is None:
        best, at = logits.float().softmax(-1).nan_to_num_(0.0).topk(count, dim=-1)
        tokens, chances = at.masked_fill(best == 0, -1).flatten().tolist(), best.flatten().tolist()
    else:
        flat, rows, width, stride = found
        out, likely = (c_int32 * (rows * count))(), (c_float * (rows * count))()
        library().truedraft_chances(flat.data_ptr(), rows, width, stride, count, out, likely)  # type: ignore[union-attr]
        tokens, chances = out[:], likely[:]
    spans = [slice(at, at + count) for at in range(0, len(tokens), count)] if count else [slice(0, 0)] * len(logits)
    if -1 in tokens:
        spans = [slice(span.start, span.start + (tokens[span] + [-1]).index(-1)) for span in spans]
    return [tokens[span] for span in spans], [chances[span] for span in spans]


def ranking() -> int:
    """The address of the compiled form of `likeliest_with_chances`, for other compiled code; 0 where there is none."""
    if (lib := library()) is None:
        return 0
    return cast(lib.truedraft_chances, c_void_p).value or 0


def two_largest(scores: Tensor, places: Sequence[int]) -> Tensor:
    """(k, 2): the two largest of the rows at k places of scores (..., width); on a GPU without synchronisation."""
    if (found := lines(scores)) is None:
        return scores.flatten(0, -2).index_select(0, torch.tensor(places, device=scores.device)).topk(2, -1).values
    flat, _, width, stride = found
    best, at, lib = scores.new_empty(len(places), 2), (c_int32 * len(places))(*places), library()
    lib.truedraft_two_largest(flat.data_ptr(), width, stride, at, len(places), best.data_ptr())  # type: ignore[union-attr]
    return best
