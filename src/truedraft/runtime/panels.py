"""Copies of weights in panels: the order in which the kernels read them (native/panels.inc).

A matrix of torch has the weights of a row side by side, so that a product over few tokens reads several distant streams
of memory and adds up lanes at the end. In a panel, the weights of sixteen rows lie side by side by column: memory is
read from front to back, and a lane is a result. A pass of one token is up to 1.5 times as fast, one of eight up to 1.7
times, for a second copy of the weights in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from truedraft.errors import NoRoom
from truedraft.runtime import large_pages, native
from truedraft.runtime.fingerprint import layout
from truedraft.runtime.native import Form
from truedraft.runtime.panel_blocks import Blocks
from truedraft.runtime.processors import processor
from truedraft.runtime.weights import PANEL_FORMS, Copies, Weight, rounded, stored

ROWS = 16  # of a panel, as PANEL in pass.c
NIBBLES = 8  # integers of four bits in a number of 32
SHIFTS = [4 * (j // 2) + 16 * (j % 2) for j in range(NIBBLES)]  # of these integers
_SHAPES = {  # columns that lie together, numbers for them, and their type
    Form.PANEL_FLOAT: (1, ROWS, torch.float32),
    Form.PANEL_BF16: (2, 2 * ROWS, torch.bfloat16),
    Form.PANEL_INT8: (4, 4 * ROWS, torch.int8),
    Form.PANEL_INT4: (NIBBLES, ROWS, torch.int32),
}
SHARE = 0.5  # of the free memory that copies may take


class Panels(Copies):
    """Copies of weights as they are, in panels."""

    def __str__(self) -> str:
        return f"{self.bytes / 1e6:,.0f} MB of weights copied into panels"

    def made(self, weight: Weight) -> Weight:
        return panels(weight)


class RoundedCopies(Copies):
    """Copies of weights in panels of integers of fewer bits, for passes that need not be exact: those of drafters.

    A pass over few tokens reads all weights once, so that it takes about as long as their bytes from memory; and a head
    of a quarter of its size may stay in the processor's cache between its passes.
    """

    bits: ClassVar[int]

    def needed(self, weight: Weight) -> bool:
        return weight.bits > self.bits

    def made(self, weight: Weight) -> Weight:
        if weight.scales is not None or weight.blocks is not None:
            weight = Weight(dequantised(weight), None, weight.bias)
        elif weight.panels:
            weight = Weight(floats_of(weight), None, weight.bias)
        return panels(rounded(weight, self.bits))


class Int8Copies(RoundedCopies):
    """In int8, with a scale per row."""

    bits = 8


class Int4Copies(RoundedCopies):
    """In int4, with a scale per group of columns, see `rounded`; rows of no multiple of eight stay as they are."""

    bits = 4

    def needed(self, weight: Weight) -> bool:
        return super().needed(weight) and weight.shape[1] % NIBBLES == 0


_OF_MODELS: WeakKeyDictionary[nn.Module, tuple[list[object], Panels]] = WeakKeyDictionary()
_ROUNDED: WeakKeyDictionary[nn.Module, tuple[list[object], dict[int, RoundedCopies]]] = WeakKeyDictionary()


def panels_of(model: nn.Module, free: int) -> Panels | None:
    """The panels of a model's weights, one copy for all its passes; None where they would take more than SHARE of the
    free bytes of memory, and on processors without AVX-512, where passes of sixteen nodes are slower from panels."""
    if "avx512f" not in processor():
        return None
    weights = list(map(layout, model.parameters()))
    kept = _OF_MODELS.get(model)
    if kept is not None and kept[0] == weights:
        return kept[1]
    _OF_MODELS.pop(model, None)
    if sum(stored(weight) for weight in model.parameters() if not hasattr(weight, "as_weight")) > SHARE * free:
        return None
    _OF_MODELS[model] = weights, Panels()
    return _OF_MODELS[model][1]


def forget(model: nn.Module) -> None:
    """Drop the copies of a model's weights; passes that read them keep them alive."""
    _OF_MODELS.pop(model, None)


def rounded_copies(model: Any, bits: int) -> RoundedCopies:
    """Those of a model's linear layers, for all its passes: 8 or 4 bits.

    Raises:
        NoRoom: they may take more than the free memory.
    """
    weights = list(map(layout, model.parameters()))
    if model not in _ROUNDED or _ROUNDED[model][0] != weights:
        _ROUNDED[model] = weights, {}
    kept = _ROUNDED[model][1]
    if not kept.get(bits):
        tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        tables.discard(model.get_output_embeddings().weight)
        numbers = sum(weight.numel() for weight in {*model.parameters()} - tables)
        need, free = numbers * (bits + 1) // 8, psutil.virtual_memory().available  # a bit for scales
        if need > free:
            raise NoRoom(f"the weights in {bits} bits need {need:,} bytes, {free:,} are free")
        kept[bits] = Int8Copies() if bits == Int8Copies.bits else Int4Copies()
    return kept[bits]


def panels(weight: Weight, to: Tensor | None = None) -> Weight:
    """A copy of a weight in panels, the last one filled up with zeros: (panels, in, 16) of fp32, (panels, in / 2,
    32) of pairs of bf16, (panels, in / 4, 64) of four columns of int8, (panels, in / 8, 16) int32 of eight integers of
    four bits.

    to: where they are written, whole panels of plain numbers; by default new memory.
    """
    values, scales, (out, width) = weight.values.contiguous(), weight.scales, weight.shape
    form = PANEL_FORMS[values.dtype]
    if form == Form.PANEL_INT8 and weight.groups and width % NIBBLES == 0 and fits_four_bits(values):
        form = Form.PANEL_INT4
    if width % (each := _SHAPES[form][0]):
        values = pad(values, (0, -width % each))
    made = _empty(out, values.shape[1], form) if to is None else to
    library = native.library()
    assert library is not None
    threads = torch.get_num_threads()
    failure = library.truedraft_panels(form, values.data_ptr(), out, values.shape[1], made.data_ptr(), threads)
    assert failure == 0
    return replace(weight, values=made, scales=None if scales is None else by_panel(scales), panels=True)


def empty_panels(out: int, width: int, dtype: torch.dtype) -> Tensor:
    """Panels for a plain weight (out, width), whose numbers are not set."""
    form = PANEL_FORMS[dtype]
    return _empty(out, width + -width % _SHAPES[form][0], form)


def _empty(out: int, width: int, form: Form) -> Tensor:
    each, numbers, dtype = _SHAPES[form]
    return large_pages.empty((-(-out // ROWS), width // each, numbers), dtype)


def dequantised(weight: Weight) -> Tensor:
    """The matrix (out, in) that integers stand for, in fp32."""
    if weight.blocks is not None:
        return Blocks.of_packed(weight.blocks, weight.values, *weight.shape).matrix()
    integers, scales, offsets = weight.values, weight.scales, weight.offsets
    assert scales is not None
    if weight.panels:
        integers, scales = _unpacked(integers), scales.mT.flatten(0, 1)
    matrix = integers.float().unflatten(1, (max(weight.groups, 1), -1)).mul_(scales.view(len(integers), -1, 1))
    if offsets is not None:
        matrix.add_(offsets.mT.flatten(0, 1)[..., None])
    return matrix.flatten(1)[: weight.shape[0]]


def floats_of(weight: Weight) -> Tensor:
    """The matrix (out, in) of a plain weight in panels, bit for bit."""
    values, (out, width) = weight.values, weight.shape
    made = torch.empty(out, values.shape[1] * columns_of(values.dtype), dtype=values.dtype)
    library = native.library()
    assert library is not None
    form, threads = PANEL_FORMS[values.dtype], torch.get_num_threads()
    failure = library.truedraft_rows(form, values.data_ptr(), out, made.shape[1], made.data_ptr(), threads)
    assert failure == 0
    return made[:, :width].contiguous()


def _unpacked(panels: Tensor) -> Tensor:
    """Panels of integers to (out, in) int8, with the zeros that fill up the last panel."""
    if panels.dtype == torch.int32:
        panels = torch.stack([(panels << (28 - shift) >> 28).to(torch.int8) for shift in SHIFTS], 2).flatten(1, 2)
    return panels.view(len(panels), -1, ROWS).mT.flatten(0, 1)


def columns_of(dtype: torch.dtype) -> int:
    """Columns of plain weights of a dtype that lie together in a panel."""
    return _SHAPES[PANEL_FORMS[dtype]][0]


def fits_four_bits(values: Tensor) -> bool:
    return int(values.min()) >= -8 and int(values.max()) <= 7


def by_panel(scales: Tensor) -> Tensor:
    """(out,) or (out, groups) to (panels, groups, 16) of fp32."""
    scales = scales.float().view(len(scales), -1)
    return pad(scales, (0, 0, 0, -len(scales) % ROWS)).unflatten(0, (-1, ROWS)).mT.contiguous()
