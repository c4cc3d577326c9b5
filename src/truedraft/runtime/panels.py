"""Copies of weights in panels: the order in which the kernels read them (native/panels.inc).

A matrix of torch has the weights of a row side by side, so that a product over few tokens reads several distant streams
of memory and adds up lanes at the end. In a panel, the weights of sixteen rows lie side by side by column: memory is
read from front to back, and a lane is a result. A pass of one token is up to 1.5 times as fast, one of eight up to 1.7
times, for a second copy of the weights in memory.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from truedraft.runtime.fingerprint import layout
from truedraft.runtime.weights import Copies, Weight, rounded, stored

ROWS = 16  # of a panel, as PANEL in pass.c
NIBBLES = 8  # integers of four bits in a number of 32
SHARE = 0.5  # of the free memory that copies may take


class Panels(Copies):
    """Copies of weights as they are, in panels."""

    def made(self, weight: Weight) -> Weight:
        return panels(weight)


class Int8Copies(Copies):
    """Copies of plain weights in int8, with a scale per row, for passes that need not be exact: those of drafters.

    A pass over few tokens reads all weights once, so that it takes about as long as their bytes from memory; and a head
    of a quarter of its size may stay in the processor's cache between its passes.
    """

    def made(self, weight: Weight) -> Weight:
        return panels(weight if weight.scales is not None else rounded(weight))


_OF_MODELS: WeakKeyDictionary[nn.Module, tuple[list[object], Panels]] = WeakKeyDictionary()


def panels_of(model: nn.Module, free: int) -> Panels | None:
    """The panels of a model's weights, one copy for all its passes; None where they would take more than SHARE of the
    free bytes of memory."""
    weights = list(map(layout, model.parameters()))
    kept = _OF_MODELS.get(model)
    if kept is not None and kept[0] == weights:
        return kept[1]
    _OF_MODELS.pop(model, None)
    if sum(map(stored, model.parameters())) > SHARE * free:
        return None
    _OF_MODELS[model] = weights, Panels()
    return _OF_MODELS[model][1]


def panels(weight: Weight) -> Weight:
    """A copy of a weight in panels, the last one filled up with zeros."""
    values, scales = weight.values, weight.scales
    if scales is not None and scales.ndim == 2:
        if values.shape[1] % NIBBLES == 0 and int(values.min()) >= -8 and int(values.max()) <= 7:
            values = _nibbles(values)
        scales = _side_by_side(scales.float())
    if values.dtype == torch.bfloat16:
        pairs = pad(values, (0, 1)) if values.shape[1] % 2 else values.contiguous()
        values = _side_by_side(pairs.view(torch.int32)).view(torch.bfloat16)  # (panels, in / 2, 16 pairs)
    else:
        values = _side_by_side(values)
    return replace(weight, values=values, scales=scales, panels=True)


def _side_by_side(values: Tensor) -> Tensor:
    """(out, in) to (panels, in, 16)."""
    if len(values) % ROWS:
        values = pad(values, (0, 0, 0, -len(values) % ROWS))
    return torch.stack(values.unflatten(0, (-1, ROWS)).unbind(1), -1)


def _nibbles(values: Tensor) -> Tensor:
    """(..., in) integers from -8 to 7 to (..., in / 8) int32, the first in the lowest four bits."""
    parts = values.to(torch.int32).bitwise_and_(15).unflatten(-1, (-1, NIBBLES))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (parts << shifts).sum(-1, dtype=torch.int32)
