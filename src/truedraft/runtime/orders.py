"""The orders in which torch adds up for a single token in bf16: measured on this machine, for each shape.

Compiled code repeats a few orders. Which of them torch has depends on its version, its libraries and the processor, so
that results are compared bit for bit before an order is used, with numbers that another order would change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraft.runtime import native
from truedraft.runtime.linears import Product
from truedraft.runtime.native import Op, OpKind, PassArguments
from truedraft.runtime.overrides import own
from truedraft.runtime.panels import panels as panels_of_weight
from truedraft.runtime.weights import Weight, padded_to_16

COLUMNS = 512, 0, 256, 1024  # that a product may add up first, in the order in which they are tried; 0: all of them
PARTS = 16  # and then equal parts, of whole STEPs, up to this many
STEP = 32  # columns that the processor's unit for tiles multiplies at once
RESULTS = 1 << 13  # of a layer that are compared at least, for each number of columns
LARGE = 1 << 25  # weights of a layer

# whose attention is compared
KEYS = (*range(1, 21), 31, 32, 33, 47, 48, 63, 64, 65, 127, 128, 129, 511, 512, 513, 700, 1025)
FEW = 83  # keys where the sum of a softmax is compared
# and sums of products: MKL adds up four or eight together and then the others, and a second 512 to the sum of the first
MANY = 300, 301, 302, 303, 306, 307, 701
ROUNDED = -1.8203125, -0.00714111328125, -2.372264862060547e-05  # add up to a score that expf() rounds the other way
HEADS = 1 << 10  # whose sums of its exponential are compared,
SPLIT = 512, 64  # keys that torch adds up before others, and heads where what it multiplies their sums by is compared
GREATER = 2.0**16  # what numbers are multiplied by that cancel each other
SUMS = 1 << 18  # results where the first is compared: another order changes about one in 100,000
GROUP = 16  # most nodes of a group, as MANY in pass.c
EPSILON = 1e-5  # of norms that are compared
ALONE = 4  # of the mode of an operation: as torch computes a single token
BY_PAIRS = 8  # and, of attention, with products in the order of MKL with instructions for bf16

_products: dict[tuple[object, ...], int | None] = {}  # columns by shape, bias and threads; None: no number is right
_attention: dict[tuple[object, ...], int | None] = {}  # modes by heads and threads; None: no mode is right
_norms: dict[int, bool] = {}


def columns_alone(layer: nn.Linear, panels: Weight) -> int | None:
    """The number of columns that torch adds up first, for single tokens of a layer; None where none gives its bits."""
    shape = (*panels.shape, layer.bias is None, layer.weight.dtype, torch.get_num_threads())
    if shape not in _products:
        _products[shape] = _columns(native.library(), layer, panels)
    return _products[shape]


@torch.no_grad()
def _columns(library: Any, layer: nn.Linear, panels: Weight) -> int | None:
    """See `columns_alone`.

    Products of other weights of the same shape are compared, whose sums are zeros but for the rounding of each
    addition: a result has the bits of another order only by chance. Of a LARGE layer, for which they would need too
    much memory, its own weights are compared: another order changes about one result in 3,000 there.
    """
    out, inner = panels.shape
    generator = _seeded(0)
    x = torch.randn(-(-RESULTS // out), inner, generator=generator).to(layer.weight.dtype)
    weight: Tensor = layer.weight
    bias: Tensor | None = layer.bias
    if out * inner < LARGE:
        half, order = inner // 2, torch.randperm(inner, generator=generator)
        weight = torch.randn(out, inner, generator=generator).to(weight.dtype)
        weight[:, half : 2 * half] = weight[:, :half]
        x[:, half : 2 * half] = -x[:, :half]
        x[:, 2 * half :] = 0
        weight, x = weight[:, order].contiguous(), x[:, order].contiguous()
        bias = None if bias is None else torch.zeros_like(bias)
        panels = panels_of_weight(Weight(weight, None, bias))
    alone = torch.cat([functional.linear(token[None, None], weight, bias)[0] for token in x])
    equal = [inner // parts for parts in range(2, PARTS + 1) if inner % (parts * STEP) == 0]
    for columns in (*COLUMNS, *equal):
        if columns < inner and torch.equal(Product(library, panels, x.dtype, columns)(x), alone):
            return columns
    return None


def attention_mode(heads: int, kv_heads: int, head: int, scale: float) -> int | None:
    """The mode in which compiled attention has torch's bits for single tokens, of this many heads of a size; None where
    it has them in none."""
    shape = heads, kv_heads, head, scale, torch.get_num_threads()
    if shape not in _attention:
        _attention[shape] = next((m for m in attention_modes() if all(_attention_alike(m, *shape[:4]))), None)
    return _attention[shape]


def attention_modes() -> list[int]:
    """The modes of compiled attention for single tokens on this processor, in the order in which they are tried."""
    bits = native.attends_alone()
    return [mode for mode in (ALONE, ALONE | BY_PAIRS) if mode & bits == mode]


@torch.no_grad()
def _attention_alike(mode: int, heads: int, kv_heads: int, head: int, scale: float) -> Iterator[bool]:
    """Comparisons at all numbers of keys; of sums of softmaxes, and of the exponentials that are computed one by one,
    of keys in them and of highest scores; and of values and of keys that cancel each other, but for the rounding of
    each addition, which shows beside the smaller ones that are left."""
    generator = _seeded(0)

    def some(*sizes: int) -> Tensor:
        return torch.randn(*sizes, head, generator=generator).to(torch.bfloat16)

    def cancelling(numbers: Tensor, dim: int, factor: float) -> Tensor:
        """In a random order, thirds that are equal but for this factor and its negative, and the other numbers."""
        count = numbers.shape[dim]
        third, order = numbers.narrow(dim, 0, count // 3), torch.randperm(count, generator=_seeded(count))
        rest = numbers.narrow(dim, count // 3, count - 2 * (count // 3))
        signs = (1.0, 1.0) if factor == 1.0 else (factor, -factor)
        return torch.cat([signs[0] * third, signs[1] * third, rest], dim).index_select(dim, order).contiguous()

    keys, values = some(kv_heads, max(KEYS)), some(kv_heads, max(KEYS))
    sums = -(-SUMS // (GROUP * heads * head)) * GROUP
    several, fewer = some(GROUP, heads), keys[:, : max(MANY)]
    one, four = torch.zeros(1, HEADS, head), torch.zeros(HEADS, 4, head)
    one[..., :3], four[:, 1:, :3] = 1.0, torch.tensor(ROUNDED)
    yield _alike(mode, 2 * some(len(KEYS), heads), keys, values, KEYS, scale)
    yield _alike(mode, some(sums, heads), keys, values, [FEW] * sums, scale)
    yield _alike(mode, one.to(torch.bfloat16), four.to(torch.bfloat16), some(HEADS, 4), [4], 1.0)
    yield _alike(mode, *_split(head), [SPLIT[0] + 1], 1.0)
    yield all(
        _alike(
            mode, several, cancelling(keys[:, :n], 1, 1.0), cancelling(values[:, :n], 1, GREATER), [n] * GROUP, scale
        )
        for n in MANY
    )
    last = cancelling(several, 2, 1.0), cancelling(fewer, 2, GREATER), values[:, : max(MANY)]
    yield _alike(mode, *last, [300] * GROUP, 1.0)


def _split(head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values where the highest score is that of the key after those that are added up first: their
    sum is multiplied by the exponential of a ROUNDED score, and that key's value takes most of it away."""
    first, heads = SPLIT
    query, keys = torch.zeros(1, heads, head), torch.zeros(heads, first + 1, head)
    query[..., :4], keys[:, 1:first, 3], keys[:, 0, :3] = 1.0, -1000.0, torch.tensor(ROUNDED)
    values = torch.randn(heads, first + 1, head, generator=_seeded(1)).to(torch.bfloat16)
    values[:, first] = -values[:, 0] * math.exp(sum(ROUNDED))
    return query.to(torch.bfloat16), keys.to(torch.bfloat16), values


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _alike(mode: int, queries: Tensor, keys: Tensor, values: Tensor, seen: Sequence[int], scale: float) -> bool:
    """Whether queries (tokens, heads, size) have torch's results over the first keys that each sees."""
    attention, share = own(functional, "scaled_dot_product_attention"), queries.shape[1] // len(keys)
    for first in range(0, len(seen), GROUP):
        counts, some = seen[first : first + GROUP], queries[first : first + GROUP]
        alone = []
        for count, of_count in groupby(zip(counts, some, strict=True), lambda pair: pair[0]):
            query = torch.stack([one for _, one in of_count])[:, :, None]
            k, v = (t[:, :count].repeat_interleave(share, 0).expand(len(query), -1, -1, -1) for t in (keys, values))
            alone.append(attention(query, k, v, scale=scale)[:, :, 0])
        if not torch.equal(torch.cat(alone), attention_alone(mode, some, keys, values, counts, scale)):
            return False
    return True


def attention_alone(
    mode: int, queries: Tensor, keys: Tensor, values: Tensor, seen: Sequence[int], scale: float
) -> Tensor:
    """Compiled attention of queries (tokens, heads, size), GROUP at most, over the first keys (heads of keys, places,
    size) that each sees, with the bits of single tokens where torch has its orders."""
    heads, head = queries.shape[1:]
    keys, values = keys.contiguous(), values.contiguous()
    op = Op(
        kind=OpKind.ATTEND, wait=1, src=0, dst=1, narrow=1, scale=scale, heads=heads, kv_heads=len(keys), head=head,
        step=head, kv_step=head, mode=mode, keys=keys.data_ptr(), values=values.data_ptr(),
    )  # fmt: skip
    results = _computed(op, queries.float().flatten(1), seen, keys.shape[1])
    return results.unflatten(1, (heads, head)).to(queries.dtype)


def norms_as_torch(width: int) -> bool:
    """Whether compiled norms of rows have torch's bits for single tokens, before these are rounded to bf16."""
    if width not in _norms:
        rows = torch.randn(GROUP, width, generator=_seeded(0)).to(torch.bfloat16).float()
        alone = [row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + EPSILON) for row in rows[:, None]]
        _norms[width] = torch.equal(norm_alone(rows), torch.cat(alone))
    return _norms[width]


def norm_alone(rows: Tensor) -> Tensor:
    """Compiled norms of rows (tokens, width) of fp32, with the bits of single tokens where torch has their order."""
    weight = torch.ones(padded_to_16(rows.shape[1]))
    op = Op(
        kind=OpKind.RMS_NORM, wait=1, src=0, dst=1, inner=rows.shape[1], weight=weight.data_ptr(), eps=EPSILON,
        mode=ALONE,
    )  # fmt: skip
    return _computed(op, rows, [1] * len(rows), 1)


def _computed(op: Op, rows: Tensor, seen: Sequence[int], places: int) -> Tensor:
    """The results of an operation over rows (tokens, width) of fp32, for tokens that see so many first places."""
    n, width = rows.shape
    x = functional.pad(rows, (0, padded_to_16(width) - width)).contiguous()
    y = torch.empty_like(x)
    numbers = {
        "nodes": n, "vocabulary": 1, "capacity": places, "positions": places, "groups": 1, "longest": max(seen),
        "slots": 1, "buffers": 2,
    }  # fmt: skip
    lists = {
        **dict.fromkeys(("token", "slot", "position", "place"), [0] * n), "base": seen, "extra_from": [0] * (n + 1),
        "extra": [], "extra_position": [], "gather": [], "group_from": [0, n], "room": [x.numel()] * 2,
        "buffer": [x.data_ptr(), y.data_ptr()], "stride": [x.shape[1]] * 2,
    }  # fmt: skip
    library, given = native.library(), PassArguments.of(numbers, lists)
    assert library is not None
    share = op.heads // op.kv_heads if op.kv_heads else 1
    if library.truedraft_pass(op, 1, given, share, torch.get_num_threads()):
        raise MemoryError(f"no memory for an operation over {n} tokens")
    return y[:, :width]
