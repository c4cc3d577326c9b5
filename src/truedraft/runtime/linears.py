"""Compiled linear layers for models without a compiled pass.

During a pass the forward of each plain linear layer (torch's, or one quantised by torchao) is replaced by a compiled
product, in the thread of the pass only; everything else is the model's own, and between passes nothing is replaced.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from truedraft.runtime import native
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.overrides import Override, overridden
from truedraft.runtime.weights import Copies, NotCompilable, Weight, fields, linear_weight, padded

SMALLEST = 1 << 17  # weights of the smallest layer for which a call pays for its few microseconds


class Linears:
    """Linear layers whose forwards are compiled products within a `with linears.compiled()` block.

    Without compiled code or supported layers the block changes nothing; `len` is the number of replaced layers.

    Args:
        copied: makes the copies that are read instead of the weights; None where these are read in place.
    """

    def __init__(self, model: nn.Module, copied: Copies | None = None):
        self.model, self._copies = model, copied
        self.refresh()

    def __len__(self) -> int:
        return len(self._forwards)

    def refresh(self) -> None:
        """Rebuild the products: weights may have been replaced, and biases and scales are copies."""
        library = native.library()
        if self._copies is not None:
            self._copies.refresh()
        found = [
            (m, _compiled(library, m, self._copies)) for m in self.model.modules() if library and type(m) is nn.Linear
        ]
        self._forwards: list[Override] = [(m, "forward", product) for m, product in found if product is not None]

    def compiled(self) -> AbstractContextManager[None]:
        """A context in which this thread runs compiled products."""
        return overridden(self._forwards)


def _compiled(library: Any, module: nn.Linear, copied: Copies | None) -> Any:
    """The compiled product of a layer, or None where the layer is not supported."""
    dtype = module.weight.dtype
    try:
        weight = linear_weight(module, dtype)
    except NotCompilable:
        return None
    out, inner = weight.shape
    if out * inner < SMALLEST or not compilable(weight, dtype):
        return None
    return partial(_forward, module, Product(library, weight if copied is None else copied(weight), dtype))


def compilable(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether there is a compiled product of a weight with vectors of a dtype."""
    return dtype in (torch.float32, torch.bfloat16) and weight.shape[1] % 16 == 0


class Product:
    """The compiled product of a weight with vectors of a dtype, with its bias added.

    columns: those that are added up first, a multiple of 16, and then the sums of these, for plain weights in panels;
        0 to add all columns up in order.
    """

    def __init__(self, library: Any, weight: Weight, dtype: torch.dtype, columns: int = 0):
        self._run, self.dtype = library.truedraft_linear, dtype
        self._kept, given = fields(weight, padded)
        if columns:
            given |= {"groups": -(-weight.shape[1] // columns), "shift": columns}
        self._op = Op(kind=OpKind.LINEAR, dst=1, narrow=dtype == torch.bfloat16, scale=1.0, **given)

    def takes(self, x: Tensor) -> bool:
        """Whether it is for such vectors; it has no gradients."""
        return not torch.is_grad_enabled() and x.dtype == self.dtype and x.device.type == "cpu" and x.numel() > 0

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out)."""
        rows = x.reshape(-1, self._op.inner).float().contiguous()
        y = torch.empty(len(rows), self._op.out, dtype=torch.float32)
        if self._run(self._op, rows.data_ptr(), len(rows), y.data_ptr(), torch.get_num_threads()):
            raise MemoryError("no memory for a linear layer's results")
        return y.to(x.dtype).view(*x.shape[:-1], self._op.out)


def _forward(module: nn.Linear, product: Product, x: Tensor) -> Tensor:
    """A layer's forward; torch's own with gradients, or for another dtype or device."""
    return product(x) if product.takes(x) else nn.Linear.forward(module, x)
