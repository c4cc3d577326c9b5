"""Weights of linear layers for the compiled pass, read in place from the memory of torch or torchao, or as copies.

Supported are plain fp32 and bf16 matrices, torchao's weight-only int8 (one scale per row) and grouped integers of up to
eight bits (one scale per group of weights of a row), symmetric in both cases, and truedraft's `PackedTensor`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from truedraft.runtime.native import Form
from truedraft.runtime.panel_blocks import BlockForm

QUANTIZED = "qdata", "scale", "offset"  # the tensors of a quantised one
GROUP = 32  # numbers of four bits in a row that share a scale
ROWS = 4096  # that are rounded together, for less memory
PANEL_FORMS = {
    torch.float32: Form.PANEL_FLOAT,
    torch.bfloat16: Form.PANEL_BF16,
    torch.int8: Form.PANEL_INT8,
    torch.int32: Form.PANEL_INT4,
}


class NotCompilable(Exception):
    """The model has something that the compiled pass does not support; its own forward is used."""


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer.

    values: (out, in), in the model's dtype or int8; in panels, see `panels.panels`.
    scales: of integers: (out,), or (out, groups), in panels (panels, groups, 16); None for plain weights.
    bias: (out,), or None.
    shape: (out, in).
    offsets: what is added to the scaled integers of a group, as scales in panels, where both may be fp16; or None.
    blocks: what blocks of the panels have, where their scales are within them: values are bytes then; else None.
    """

    values: Tensor
    scales: Tensor | None
    bias: Tensor | None
    shape: tuple[int, int] = (0, 0)
    panels: bool = False
    offsets: Tensor | None = None
    blocks: BlockForm | None = None

    def __post_init__(self) -> None:
        if not self.panels:
            out, width = self.values.shape
            object.__setattr__(self, "shape", (out, width))

    def part(self, first: int, last: int) -> Weight:
        """The rows [first, last) of it; of panels, where they begin with one."""
        bias = None if self.bias is None else self.bias[first:last]
        if not self.panels:
            return Weight(self.values[first:last], None if self.scales is None else self.scales[first:last], bias)
        if first % 16:
            raise NotCompilable(f"a part of its weights begins in row {first}, not a multiple of sixteen")
        span, shape = slice(first // 16, -(-last // 16)), (last - first, self.shape[1])
        rows, scales, offsets = (None if t is None else t[span] for t in (self.values, self.scales, self.offsets))
        return replace(self, values=cast(Tensor, rows), scales=scales, offsets=offsets, bias=bias, shape=shape)

    def itself(self) -> Weight:
        return self

    @property
    def form(self) -> Form:
        if self.blocks is not None:
            return Form.PANEL_BLOCKS
        if self.panels:
            return PANEL_FORMS[self.values.dtype]
        if self.scales is None:
            return Form.BF16 if self.values.dtype == torch.bfloat16 else Form.FLOAT
        return Form.INT8 if self.scales.ndim == 1 else Form.GROUPED

    @property
    def bits(self) -> int:
        """Of one of its numbers."""
        if self.blocks is not None:
            return self.blocks.bits
        return 4 if self.form == Form.PANEL_INT4 else 8 * self.values.itemsize

    @property
    def groups(self) -> int:
        """Of columns that share a scale; 0 where each row of integers has one, and for plain weights."""
        return 0 if self.scales is None or self.scales.ndim == 1 else self.scales.shape[1]


class Copies(ABC):
    """Copies of weights, made once, and again after the weights were written to.

    torch counts what is written to a tensor, but not what is written past it (`weight.data`), so that a column is
    compared as well.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.Size], _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def needed(self, weight: Weight) -> bool:
        """Whether a copy is read instead of the weight."""
        return not weight.panels

    @abstractmethod
    def made(self, weight: Weight) -> Weight:
        """A new copy."""

    def __call__(self, weight: Weight) -> Weight:
        """A weight's copy, or itself where none is needed."""
        if not self.needed(weight):
            return weight
        key = weight.values.data_ptr(), weight.values.shape
        if key not in self._kept:
            self._kept[key] = _Kept(weight, self.made(weight))
        return replace(self._kept[key].copy, bias=weight.bias)

    def clear(self) -> None:
        """Forget all copies."""
        self._kept.clear()

    def refresh(self) -> None:
        """Make the copies of changed weights again, in place."""
        for kept in self._kept.values():
            if kept.changed:
                made = self.made(kept.weight)
                kept.copy.values.copy_(made.values)
                if made.scales is not None and kept.copy.scales is not None:
                    kept.copy.scales.copy_(made.scales)
                kept.note()

    @property
    def bytes(self) -> int:
        """Memory of all copies."""
        tensors = [t for kept in self._kept.values() for t in (kept.copy.values, kept.copy.scales) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


class _Noted:
    """Tensors, and what they were when they were last noted."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = tensors
        self.note()

    def note(self) -> None:
        self._noted = [(version, column.clone()) for version, column in map(_state, self._tensors)]

    @property
    def changed(self) -> bool:
        return any(
            version != before or not torch.equal(column, held)
            for (version, column), (before, held) in zip(map(_state, self._tensors), self._noted, strict=True)
        )


class _Kept(_Noted):
    """A weight, its copy, and what the weight was when that was made."""

    def __init__(self, weight: Weight, copy: Weight):
        super().__init__([t for t in (weight.values, weight.scales) if t is not None])
        self.weight, self.copy = weight, copy


class Derived(_Noted):
    """A tensor that a function makes of weights, made again after these were written to."""

    def __init__(self, make: Callable[[], Tensor], weights: Sequence[Tensor]):
        super().__init__(weights)
        self._make, self.tensor = make, make()

    def refresh(self) -> None:
        if self.changed:
            self.tensor.copy_(self._make())
            self.note()


def _state(matrix: Tensor) -> tuple[int, Tensor]:
    """How often it was written to, as torch counts, and one of its columns."""
    return 0 if matrix.is_inference() else matrix._version, matrix[..., matrix.shape[-1] // 2]


def rounded(weight: Weight, bits: int = 8) -> Weight:
    """A plain weight in symmetric integers.

    bits: 8, with scales of the largest magnitude of a row / 127; or 4, of that of a group / 7. A group is 32 columns,
        or where a row is no multiple of them the largest power of two that divides it.
    """
    width = weight.shape[1]
    group, most = (width, 127) if bits == 8 else (math.gcd(width, GROUP), 7)
    integers, scales = [], []
    for rows in weight.values.split(ROWS):
        numbers = rows.float().unflatten(1, (-1, group))
        scale = (numbers.abs().amax(2) / most).clamp_min(torch.finfo(torch.float32).tiny)
        integers.append((numbers / scale[..., None]).round_().to(torch.int8).flatten(1))
        scales.append(scale)
    of_groups = torch.cat(scales)
    return Weight(torch.cat(integers), of_groups[:, 0] if bits == 8 else of_groups, weight.bias)


def linear_weight(layer: Any, dtype: torch.dtype) -> Weight:
    """The weight of an ordinary linear layer of a model of `dtype`.

    Raises:
        NotCompilable: the layer is of another class, or its memory layout is not supported.
    """
    if type(layer) is not nn.Linear and not (_falcons(layer) and layer.bias is None):
        raise NotCompilable(f"it has a {type(layer).__name__} where a linear layer stood")
    weight = layer.weight
    if hasattr(weight, "as_weight"):  # a PackedTensor, whose module needs torchao
        return cast(Weight, weight.as_weight(layer.bias))
    if type(weight).__module__.startswith("torchao."):
        return Weight(*integers(weight), layer.bias)
    return Weight(plain(weight, dtype), None, layer.bias)


def _falcons(layer: Any) -> bool:
    """Whether it is Falcon's class of linear layers, which round before they add a bias."""
    kind = type(layer)
    return (kind.__module__, kind.__name__) == ("transformers.models.falcon.modeling_falcon", "FalconLinear")


def fields(weight: Weight, copied: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors to keep alive, and the fields of an operation that refer to their memory.

    copied: copies a vector for the kernels; see `padded`.
    """
    bias = None if weight.bias is None else copied(weight.bias)
    scales = weight.scales
    if scales is not None and not weight.panels and (scales.ndim == 1 or scales.dtype != torch.float32):
        scales = copied(scales.view(-1))
    kept = [t for t in (weight.values, bias, scales, weight.offsets) if t is not None]
    pointers = {
        name: None if tensor is None else tensor.data_ptr()
        for name, tensor in {"bias": bias, "scales": scales, "offsets": weight.offsets}.items()
    }
    of_group = weight.shape[1] // max(weight.groups, 1)
    half = weight.panels and scales is not None and scales.dtype == torch.float16
    return kept, dict(
        weight=weight.values.data_ptr(), out=weight.shape[0], inner=weight.shape[1], form=weight.form,
        groups=weight.groups, half=half, **pointers,
        shift=of_group.bit_length() - 1 if weight.blocks is None else weight.blocks.code,
    )  # fmt: skip


def pair(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The fields of an operation that refer to its two weights, from those of each."""
    names = {"weight": "second", "scales": "second_scales", "offsets": "second_offsets", "bias": "other_bias"}
    return first | {name: second[of] for of, name in names.items()}


def padded_to_16(numbers: int) -> int:
    """Numbers of a row that ends with whole vectors of the kernels."""
    return (numbers + 15) // 16 * 16


def padded(vector: Tensor, offset: float = 0.0, sums: torch.dtype = torch.float32) -> Tensor:
    """A norm, bias or scales as fp32, plus `offset`, zero-padded to a multiple of sixteen.

    sums: the type in which the offset is added.
    """
    result = torch.zeros(padded_to_16(len(vector)), dtype=torch.float32)
    result[: len(vector)] = vector.detach().to(sums) + offset if offset else vector.detach()
    return result


def plain(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in place, if it is contiguous, of `dtype` and on the CPU; or on the "meta" device, of a model that is
    only planned.

    The result keeps the memory alive: the parameter may be reassigned while a pass reads it. Of a weight that is in
    panels alone, and is not written to, it is a copy.
    """
    if hasattr(weight, "looked_up"):  # a PanelTensor
        weight = weight.dequantize()
    if weight.dtype != dtype or not weight.is_contiguous() or weight.device.type not in ("cpu", "meta"):
        raise NotCompilable(f"weights are not all {dtype} and contiguous on the CPU")
    return weight.detach()


def matrix(weight: Any, dtype: torch.dtype) -> Weight:
    """A plain matrix in place, in rows or in panels; of the matrices of experts, their rows one after another.

    Raises:
        NotCompilable: see `plain`.
    """
    if not hasattr(weight, "as_weight"):
        return Weight(plain(weight, dtype).flatten(0, -2), None, None)
    whole: Weight = weight.as_weight(None)
    if whole.values.dtype != dtype:
        raise NotCompilable(f"it has quantised weights where plain ones of {dtype} stood")
    return whole


def table(weight: Any, dtype: torch.dtype) -> Weight:
    """A table of embeddings in place: a plain matrix, or one in blocks.

    Raises:
        NotCompilable: see `plain`.
    """
    if hasattr(weight, "as_weight") and weight.dtype == dtype and weight.as_weight(None).blocks is not None:
        return cast(Weight, weight.as_weight(None))
    return matrix(weight, dtype)


def integers(weight: Any) -> tuple[Tensor, Tensor]:
    """The integers (out, in) of a tensor of torchao, and their scales: (out,) or (out, groups)."""
    kind = type(weight).__name__
    values, scales = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    block = tuple(getattr(weight, "block_size", ()))
    if values is None or scales is None or values.dtype != torch.int8 or len(block) != 2 or block[0] != 1:
        raise NotCompilable(f"the compiled pass does not read torchao's {kind}")
    if any(getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "activation_quantization")):
        raise NotCompilable("its activations are quantised too")
    if getattr(weight, "act_pre_scale", None) is not None:
        raise NotCompilable("its activations are scaled first")
    zero = getattr(weight, "zero_point", None)
    if zero is not None and zero.any():
        raise NotCompilable("its integers are not symmetric around zero")
    if not (values.is_contiguous() and scales.is_contiguous()) or values.device.type != "cpu":
        raise NotCompilable("weights are not all contiguous on the CPU")
    width, group = values.shape[1], block[1]
    if group < width and (group & (group - 1) or group < 16 or width % group):
        raise NotCompilable(f"its groups of {group} weights are not a power of two from 16 on")
    values, scales = values.detach(), scales.detach()
    return values, scales.view(-1) if group >= width else scales


def stored(weight: Any) -> int:
    """Bytes of a parameter that a pass reads, scales included."""
    parts = [getattr(weight, name, None) for name in QUANTIZED] if hasattr(weight, "qdata") else [weight]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)
