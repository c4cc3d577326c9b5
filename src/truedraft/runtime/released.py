"""Weights that are kept once: in panels alone (`panels.py`), the order in which compiled passes read them.

Compiled passes read copies of weights in panels, beside the weights of the model. Here the copy takes the place of the
weight, layer by layer, so that no more than a layer is held twice. For torch it is the same matrix: a product with it
is compiled where it can be, else the matrix is made first.

Weights of a file that is mapped into memory, as those of safetensors are, share their mapping with the embeddings,
which stay: the system is told that the pages of the others are not needed any more.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torchao.utils import TorchAOBaseTensor

from truedraft.runtime import native
from truedraft.runtime.linears import Product, compilable
from truedraft.runtime.panels import floats_of, panels
from truedraft.runtime.processors import processor
from truedraft.runtime.weights import NotCompilable, Weight, linear_weight

PAGE_OUT = 21  # MADV_PAGEOUT of Linux, from 5.4 on


class PanelTensor(TorchAOBaseTensor):
    """A matrix (rows, columns) of fp32 or bf16, kept in panels.

    Args:
        qdata: the panels; named as the numbers of torchao's tensors are.
        dtype: of the matrix.
    """

    tensor_data_names = ["qdata"]
    tensor_attribute_names = ["rows", "columns", "dtype"]
    scale = None

    def __new__(cls, qdata: Tensor, rows: int, columns: int, dtype: torch.dtype) -> PanelTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, (rows, columns), dtype=dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata: Tensor, rows: int, columns: int, dtype: torch.dtype):
        self.qdata, self.rows, self.columns = qdata, rows, columns

    def as_weight(self, bias: Tensor | None) -> Weight:
        """As the compiled pass reads it."""
        return Weight(self.qdata, None, bias, (self.rows, self.columns), True)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix, in a dtype, by default its own: the weight that was given, bit for bit."""
        return floats_of(self.as_weight(None)).to(dtype or self.dtype)


@PanelTensor.implements_torch_function(torch.nn.functional.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, matrix, bias = (*args, *kwargs.values(), None)[:3]
    product = Product(native.library(), matrix.as_weight(None), matrix.dtype)
    if not product.takes(x):
        return linear(x, matrix.dequantize(x.dtype), bias)
    return product(x) if bias is None else product(x) + bias


@PanelTensor.implements([torch.ops.aten.t.default, torch.ops.aten.mm.default])
def _plain(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Operations for which it is the matrix."""
    return func(*(a.dequantize() if isinstance(a, PanelTensor) else a for a in args), **kwargs)


def release_weights(model: nn.Module) -> int:
    """Keep the weights of a model's linear layers in panels alone; those that an embedding shares stay as they are.

    Returns:
        Bytes of the weights that were replaced; 0 on processors for which compiled passes make no copies.
    """
    if native.library() is None or "avx512f" not in processor():
        return 0
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    files, replaced = _mapped_files(), 0
    for layer in linears:
        if owners[id(layer.weight)] == 1 and _releasable(layer):
            replaced += layer.weight.nbytes
            made = panels(linear_weight(layer, layer.weight.dtype))
            kept, before = PanelTensor(made.values, *made.shape, layer.weight.dtype), layer.weight
            layer.weight = nn.Parameter(kept, requires_grad=False)
            _page_out(before, files)
            del before
    if replaced and sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # what glibc has kept of weights that were freed
    return replaced


def _releasable(layer: nn.Linear) -> bool:
    if type(layer.weight.data) is not Tensor or layer.weight.device.type != "cpu":
        return False
    try:
        return compilable(linear_weight(layer, layer.weight.dtype), layer.weight.dtype)
    except NotCompilable:
        return False


def _mapped_files() -> list[tuple[int, int]]:
    """Where files are mapped into the memory of this process, on Linux: first and last address of each."""
    if not sys.platform.startswith("linux"):
        return []
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode = line.split()[:5]
        if inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end))
    return found


def _page_out(weight: Tensor, files: list[tuple[int, int]]) -> None:
    """Let the system drop the whole pages of a weight that is mapped from a file; they are read again if they are
    needed, and what was written to them is kept."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and any(first <= start and end <= last for first, last in files):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), PAGE_OUT)  # a hint: may fail
