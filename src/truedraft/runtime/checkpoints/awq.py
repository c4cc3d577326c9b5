"""AWQ, as AutoAWQ and GPTQModel save it in the layout "gemm": eight rows of a column in a number of 32 bits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from truedraft.runtime.checkpoints._base import Folder, Integers, unpacked

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight rows, from the lowest bits on


class Awq(Folder):
    mark = "qweight"
    parts = ("qzeros", "scales")

    def check(self) -> None:
        bits = self.settings.get("bits", self.settings.get("w_bit"))
        layout = self.settings.get("version") or self.settings.get("checkpoint_format") or "gemm"
        if bits != 4:
            raise self.refused(f"AWQ of {bits} bits", "give one of 4")
        if layout.lower() != "gemm":
            raise self.refused(f"AWQ in the layout {layout!r}", "save it as 'gemm'")

    def integers(self, part: Callable[[str], Tensor | None]) -> Integers:
        weight, zeros, scales = map(part, (self.mark, *self.parts))
        assert weight is not None and zeros is not None and scales is not None
        codes, zeros = (unpacked(t, 4).unflatten(1, (-1, 8))[..., PLACES].flatten(1).T for t in (weight, zeros))
        return Integers.of_codes(codes, 8, scales.T, zeros)
