"""A matrix of integers of four or eight bits, kept once, in the order in which the compiled pass reads them.

It is a tensor of torchao's kind, so that it stands as the weight of a linear layer. For torch it is the matrix that its
integers stand for; a product with it is compiled where it can be, else that matrix is computed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.utils.weak import WeakIdKeyDictionary
from torchao.utils import TorchAOBaseTensor

from truedraft.runtime import large_pages, native
from truedraft.runtime.linears import Product, compilable
from truedraft.runtime.panel_blocks import BlockForm, Blocks
from truedraft.runtime.panels import NIBBLES, ROWS, SHIFTS, by_panel, dequantised, fits_four_bits, panels
from truedraft.runtime.weights import Weight

aten = torch.ops.aten
LOOKED_UP = 1 << 8  # rows that are looked up together, for less memory
TOGETHER = 1 << 12  # rows that are computed together, for less memory; whole panels of them


class PackedTensor(TorchAOBaseTensor):
    """Integers q (out, in) that stand for q * scale + offset, with a scale and an offset for each group of columns.

    Args:
        qdata, scale, offset: in panels; see `Weight`. Without an offset the integers are symmetric around zero.
        rows, columns: out and in.
        dtype: of the matrix, for torch.
    """

    tensor_data_names = ["qdata", "scale"]
    tensor_attribute_names = ["rows", "columns", "dtype"]
    optional_tensor_data_names = ["offset"]

    def __new__(
        cls, qdata: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype, offset: Tensor | None = None
    ) -> PackedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, (rows, columns), dtype=dtype, device=qdata.device, requires_grad=False
        )

    def __init__(
        self, qdata: Tensor, scale: Tensor, rows: int, columns: int, dtype: torch.dtype, offset: Tensor | None = None
    ):
        self.qdata, self.scale, self.offset = qdata, scale, offset
        self.rows, self.columns = rows, columns

    @classmethod
    def of_integers(
        cls, values: Tensor, scales: Tensor, offsets: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> PackedTensor:
        """Pack integers, in four bits each where all are in [-8, 7]; scales and offsets in fp16 where that is exact.

        Args:
            values: (out, in) int8.
            scales, offsets: (out, groups).

        Raises:
            ValueError: the groups are not of equal numbers of columns, a multiple of eight.
        """
        out, width = values.shape
        groups = scales.shape[1]
        if width % (NIBBLES * groups):
            raise ValueError(f"{groups} groups of {width} columns: each needs a multiple of {NIBBLES}")
        if native.library() is None:
            qdata = _packed(values)
        else:
            qdata = panels(Weight(values, scales, None)).values
        factors = [by_panel(scales)] if offsets is None else [by_panel(scales), by_panel(offsets)]
        if all(torch.equal(f.half().float(), f) for f in factors):
            factors = [f.half() for f in factors]
        return cls(qdata, factors[0], out, width, dtype, *factors[1:])

    def as_weight(self, bias: Tensor | None) -> Weight:
        """As the compiled pass reads it."""
        return Weight(self.qdata, self.scale, bias, (self.rows, self.columns), True, self.offset)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix (out, in) in a dtype, by default its own; computed in fp32."""
        made, whole = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device), self.as_weight(None)
        for start in range(0, self.rows, TOGETHER):
            end = min(start + TOGETHER, self.rows)
            made[start:end] = dequantised(whole.part(start, end))
        return made


def _packed(values: Tensor) -> Tensor:
    """(out, in) int8 to panels, as the compiled code makes them."""
    by_column = pad(values, (0, 0, 0, -len(values) % ROWS)).unflatten(0, (-1, ROWS)).mT  # (panels, in, 16)
    if not fits_four_bits(values):
        return by_column.unflatten(1, (-1, 4)).flatten(2).contiguous()
    made = torch.zeros(len(by_column), values.shape[1] // NIBBLES, ROWS, dtype=torch.int32, device=values.device)
    for j, shift in enumerate(SHIFTS):
        made |= (by_column[:, j::NIBBLES].int() & 15) << shift
    return made


_PRODUCTS = WeakIdKeyDictionary()  # of packed tensors, which a copy of a tensor cannot share


def _product(matrix: PackedTensor) -> Product | None:
    """Its compiled product, if there is one."""
    if matrix not in _PRODUCTS:
        library, weight = native.library(), matrix.as_weight(None)
        made = Product(library, weight, matrix.dtype) if library and compilable(weight, matrix.dtype) else None
        _PRODUCTS[matrix] = made
    return cast(Product | None, _PRODUCTS[matrix])


@PackedTensor.implements_torch_function(torch.nn.functional.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, matrix, bias = (*args, *kwargs.values(), None)[:3]
    product = _product(matrix)
    if product is None or not product.takes(x):
        return linear(x, matrix.dequantize(x.dtype), bias)
    return product(x) if bias is None else product(x) + bias


@PackedTensor.implements([aten.t.default, aten.mm.default, aten.equal.default, aten.mean.dim])
def _plain(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Operations for which it is the matrix that it stands for."""
    matrices = (a.dequantize() if isinstance(a, PackedTensor) else a for a in args)
    return func(*matrices, **kwargs)


class BlocksTensor(PackedTensor):
    """A matrix in panels that have their scales within them; it has the operations that were registered above.

    Args:
        qdata: see `Blocks.of_packed`.
        form: what a block has.
        rows, columns, dtype: as of a `PackedTensor`.
    """

    tensor_data_names = ["qdata"]
    tensor_attribute_names = ["form", "rows", "columns", "dtype"]
    optional_tensor_data_names: list[str] = []

    def __new__(cls, qdata: Tensor, form: BlockForm, rows: int, columns: int, dtype: torch.dtype) -> BlocksTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, (rows, columns), dtype=dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata: Tensor, form: BlockForm, rows: int, columns: int, dtype: torch.dtype):
        self.qdata, self.form, self.rows, self.columns = qdata, form, rows, columns
        self.scale = self.offset = None  # type: ignore[assignment]  # they are within

    @classmethod
    def of_file(
        cls, kind: int, form: BlockForm, parts: Iterable[Tensor], rows: int, columns: int, dtype: torch.dtype
    ) -> BlocksTensor:
        """Pack the rows of a type of GGUF.

        Args:
            kind: the number that GGUF has for the type; form: what its blocks have.
            parts: (n, bytes) uint8, rows as in the file, all but the last part of whole panels.
            rows, columns: of the matrix.
        """
        library, made = (
            native.library(),
            large_pages.empty((-(-rows // ROWS), form.bytes_of_panel(columns)), torch.uint8),
        )
        assert library is not None
        first = 0
        for part in parts:
            to = made[first // ROWS :]
            failure = library.truedraft_pack_blocks(kind, part.data_ptr(), len(part), columns, to.data_ptr())
            assert failure == 0 and part.is_contiguous()
            first += len(part)
        return cls(made, form, rows, columns, dtype)

    def as_weight(self, bias: Tensor | None) -> Weight:
        return Weight(self.qdata, None, bias, (self.rows, self.columns), True, blocks=self.form)

    def looked_up(self, ids: Tensor) -> Tensor:
        """The rows of these numbers, (*ids, columns).

        Raises:
            IndexError: there are no such rows.
        """
        if ids.numel() and not (ids.min() >= 0 and ids.max() < self.rows):
            raise IndexError(f"rows are numbered from 0 to {self.rows - 1}")
        found = torch.empty(ids.numel(), self.columns, dtype=self.dtype)
        for rows, some in zip(found.split(LOOKED_UP), ids.flatten().split(LOOKED_UP), strict=True):
            which, of = (some // ROWS).unique(return_inverse=True)
            matrix = Blocks.of_packed(self.form, self.qdata[which], ROWS * len(which), self.columns).matrix()
            rows.copy_(matrix[ROWS * of + some % ROWS])
        return found.view(*ids.shape, self.columns)


@BlocksTensor.implements_torch_function(torch.nn.functional.embedding)
def _embedding(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    ids, matrix = (*args, *kwargs.values())[:2]
    return matrix.looked_up(ids)


@BlocksTensor.implements(aten.slice.Tensor)
def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Some of the rows, or columns."""
    matrix, dimension, *bounds = args
    if dimension:
        return func(matrix.dequantize(), dimension, *bounds)
    return matrix.looked_up(func(torch.arange(matrix.rows), 0, *bounds))
