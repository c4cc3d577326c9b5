"""The linear layers of any model by compiled code, for models whose whole pass has no program.

During a pass the forward of each plain linear layer (torch's, or one quantised by torchao) is the compiled product, in
the thread that makes the pass; everything else is the model's own, and between passes the model is as it was.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from truedraft.runtime import native
from truedraft.runtime.native import Kind, Op
from truedraft.runtime.overrides import Override, overridden
from truedraft.runtime.weights import NotCompilable, Weight, fields, linear_weight, padded

SMALLEST = 1 << 17  # weights of a layer for which a call is worth its few microseconds


class Linears:
    """Linear layers whose forwards are compiled products within a `with linears.compiled()` block.

    Where there is no compiled code, or no layer that it knows, the block changes nothing; `len` says how many it does.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.refresh()

    def __len__(self) -> int:
        return len(self._forwards)

    def refresh(self) -> None:
        """Look again at the layers: weights may have been replaced since, and biases and scales are copies."""
        library = native.library()
        found = [(m, _compiled(library, m)) for m in self.model.modules() if library and type(m) is nn.Linear]
        self._forwards: list[Override] = [(m, "forward", product) for m, product in found if product is not None]

    def compiled(self) -> AbstractContextManager[None]:
        """The block in which this thread's products are compiled ones."""
        return overridden(self._forwards)


def _compiled(library: Any, module: nn.Linear) -> Any:
    """The compiled product of a layer as it stands, or None where there is none."""
    dtype = module.weight.dtype
    try:
        weight = linear_weight(module, dtype)
    except NotCompilable:
        return None
    out, inner = weight.values.shape
    if dtype not in (torch.float32, torch.bfloat16) or inner % 16 or out * inner < SMALLEST:
        return None
    kept, given = fields(weight, padded)
    op = Op(kind=Kind.LINEAR, dst=1, narrow=dtype == torch.bfloat16, scale=1.0, **given)
    return partial(_product, library.truedraft_linear, module, op, weight, kept)


def _product(run: Any, module: nn.Linear, op: Op, weight: Weight, kept: list[Tensor], x: Tensor) -> Tensor:
    """x (..., in) to (..., out); torch's own where a gradient is wanted or x is not what the layer was made for."""
    if torch.is_grad_enabled() or x.dtype != module.weight.dtype or x.device.type != "cpu" or not x.numel():
        return nn.Linear.forward(module, x)
    rows = x.reshape(-1, op.inner).float().contiguous()
    y = torch.empty(len(rows), op.out, dtype=torch.float32)
    if run(op, rows.data_ptr(), len(rows), y.data_ptr(), torch.get_num_threads()):
        raise MemoryError("no memory for a linear layer's results")
    return y.to(x.dtype).view(*x.shape[:-1], op.out)
