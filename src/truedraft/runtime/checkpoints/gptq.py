"""GPTQ, as AutoGPTQ, GPTQModel and Optimum save it: columns of eight integers in a number of 32 bits.

There are two formats, which differ in the zero points alone: the first has them less one. Tools have written either
under the name of the other, or under none; so the numbers decide where they show it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from truedraft.errors import Note
from truedraft.runtime.checkpoints._base import Folder, Integers, unpacked

BITS = (2, 4, 8)
LAYOUTS = ("gptq", "gptq_v2")
LAYERS, COLUMNS = 8, 256  # that are read to tell the format
CLEAR = 0.25  # farthest that weights are from a mean of zero, in steps, where they show the format


class Gptq(Folder):
    mark = "qweight"
    parts = ("qzeros", "scales", "g_idx")

    def check(self) -> None:
        if (bits := self.settings.get("bits")) not in BITS:
            raise self.refused(f"GPTQ of {bits} bits", "give one of 2, 4 or 8")
        if self._named not in (None, *LAYOUTS):
            raise self.refused(f"GPTQ in the layout {self._named!r}", f"save it as one of {', '.join(LAYOUTS)}")
        if (packing := self.settings.get("pack_dtype") or "int32") != "int32":
            raise self.refused(f"GPTQ packed in {packing}", "save it packed in int32")

    @property
    def _named(self) -> str | None:
        """The format by its name."""
        return self.settings.get("checkpoint_format") or self.settings.get("format")

    @cached_property
    def _layout(self) -> str:
        """The format, by the numbers of some layers where they show it, else by its name.

        A symmetric checkpoint has one zero point, the middle of the codes. Else weights have a mean near zero, so that
        codes have one near their zero points.
        """
        every = [name.removesuffix(f".{self.mark}") for name in self.files if name.endswith(f".{self.mark}")]
        some = sorted(every)[:: max(len(every) // LAYERS, 1)]
        away = median(self._from_zero(layer) for layer in some) if some else 1.0
        shown = min(LAYOUTS, key=lambda layout: abs(away - (layout == "gptq")))
        if abs(away - (shown == "gptq")) > CLEAR:
            return self._named or "gptq"
        if self._named not in (None, shown):
            text = f"its config.json says {self._named}, but its zero points are those of {shown}: read as {shown}"
            warnings.warn(f"{self.model}: {text}", Note, stacklevel=3)
        return shown

    def _from_zero(self, layer: str) -> float:
        """How far the mean of some of a layer's codes is from that of the zero points as they are stored."""
        weight, zeros, _, group_of = (self.files[f"{layer}.{part}"] for part in (self.mark, *self.parts))
        bits = 32 * len(weight) // len(group_of)
        columns = 32 // bits * (COLUMNS * bits // 32)
        stored = unpacked(zeros, bits)[:, : min(columns, weight.shape[1])]
        if bool((stored == stored[0, 0]).all()) and (less := (1 << (bits - 1)) - int(stored[0, 0])) in (0, 1):
            return float(less)
        codes = unpacked(weight[:, : stored.shape[1]].T, bits)
        return float(codes.float().mean() - stored[group_of.long()].float().mean())

    def integers(self, part: Callable[[str], Tensor | None]) -> Integers:
        """The width of a layer, and with it the number of bits, is that of `g_idx`: it may differ between layers."""
        weight, zeros, scales, group_of = map(part, (self.mark, *self.parts))
        assert weight is not None and zeros is not None and scales is not None and group_of is not None
        bits = 32 * len(weight) // len(group_of)
        if self._layout == "gptq":  # one was subtracted from all zeros of a number at once
            zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
        groups, out = scales.shape
        side_by_side = torch.arange(len(group_of)) * groups // len(group_of)
        codes, zeros = unpacked(weight.T, bits), unpacked(zeros, bits)[:, :out].T
        return Integers.of_codes(
            codes,
            1 << (bits - 1),
            scales.T,
            zeros,
            None if torch.equal(group_of.long(), side_by_side) else group_of.long(),
        )
