"""GPTQ, as AutoGPTQ, GPTQModel and Optimum save it: columns of eight integers in a number of 32 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from truedraft.runtime.checkpoints._base import Folder, Integers, unpacked

BITS = (2, 4, 8)
LAYOUTS = ("gptq", "gptq_v2")


class Gptq(Folder):
    mark = "qweight"
    parts = ("qzeros", "scales", "g_idx")

    def check(self) -> None:
        if (bits := self.settings.get("bits")) not in BITS:
            raise self.refused(f"GPTQ of {bits} bits", "give one of 2, 4 or 8")
        if self._layout not in LAYOUTS:
            raise self.refused(f"GPTQ in the layout {self._layout!r}", f"save it as one of {', '.join(LAYOUTS)}")

    @property
    def _layout(self) -> str:
        return self.settings.get("checkpoint_format") or "gptq"

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
