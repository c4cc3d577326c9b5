"""Panels that have their scales within them: blocks of GGUF in the order in which the compiled pass reads them.

A product of one token takes as long as its weights take from memory, so that they are kept in as few bytes as in the
file, in one stream. Processors without products for them read plain integers instead, see `Blocks.integers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PANEL = 16  # rows
SUPER = 256  # columns that share a unit of scales
EACH_BYTE = 0x01010101  # times a number of at most 7 bits: this in each byte of an integer of 32
# what the integers of IQ4_NL and IQ4_XS stand for
TABLE = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)


@dataclass(frozen=True)
class BlockForm:
    """What a block of a row has, as `Blocks` of pass.c.

    bits: of an integer: 4, 5, 6 or 8.
    offset: groups have offsets; else integers are symmetric around zero.
    fine: scales are bytes with signs, or with offsets both are from 0 to 63, times numbers that 256 columns share; else
        they are of 16 bits.
    table: integers choose a number of `TABLE`.
    """

    bits: int
    offset: bool = False
    fine: bool = False
    table: bool = False

    @property
    def code(self) -> int:
        """As pass.c has it."""
        return (3 if self.table else self.bits) | self.offset << 4 | self.fine << 5

    @property
    def columns(self) -> int:
        """That share a scale."""
        return 16 if self.bits == 6 else 32

    def bytes_of_panel(self, columns: int) -> int:
        """Bytes of the sixteen rows of a panel."""
        factors = 1 + self.offset
        of_block = self.columns * self.bits // 8 + factors * (1 if self.fine else 2)
        units = 2 * factors * (columns // SUPER) if self.fine else 0
        return PANEL * (columns // self.columns * of_block + units)

    @property
    def half(self) -> int:
        """What is subtracted from an integer without a sign."""
        return 0 if self.offset or self.table else 1 << (self.bits - 1)


@dataclass(frozen=True)
class Blocks:
    """A matrix of integers in blocks, of which each number is (integer - half) * scale + offset in fp32.

    codes: (out, in) uint8.
    scales, offsets: (out, groups), int8 where they are fine, else float16; offsets may be None.
    units, offset_units: (out, in / 256) float16, by which fine ones are multiplied; else None.
    """

    form: BlockForm
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    units: Tensor | None = None
    offset_units: Tensor | None = None

    def rows(self, order: Tensor | slice) -> Blocks:
        """Some of its rows, or all in another order."""
        parts = self.codes, self.scales, self.offsets, self.units, self.offset_units
        return Blocks(self.form, *(part if part is None else part[order] for part in parts))  # type: ignore[arg-type]

    def integers(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Integers with signs (out, in) int8, of four bits where it has no more, and scales and offsets in fp32."""
        scales, offsets = _of_groups(self.scales, self.units), None
        away = 8 if self.form.bits == 4 and not self.form.table else self.form.half
        if self.offsets is not None:
            offsets = _of_groups(self.offsets, self.offset_units)
            if away:
                offsets = away * scales + offsets
        codes = TABLE[self.codes.int()] if self.form.table else (self.codes - away).view(torch.int8)
        return codes, scales, offsets

    def matrix(self) -> Tensor:
        """What it stands for."""
        codes, form = self.codes, self.form
        numbers = TABLE[codes.int()].float() if form.table else codes.float().sub_(form.half)
        numbers = numbers.unflatten(1, (-1, form.columns))
        numbers.mul_(_of_groups(self.scales, self.units)[..., None])
        if self.offsets is not None:
            numbers.add_(_of_groups(self.offsets, self.offset_units)[..., None])
        return numbers.flatten(1)

    @classmethod
    def of_packed(cls, form: BlockForm, packed: Tensor, rows: int, columns: int) -> Blocks:
        """The matrix of panels, (panels, bytes) uint8: what `truedraft_pack_blocks` has made of a file."""
        parts: list[Tensor | None] = [None, None]
        blocks, factors = packed, 1 + form.offset
        if form.fine:
            blocks = blocks.unflatten(1, (columns // SUPER, -1))
            units, blocks = blocks[..., : 2 * PANEL * factors], blocks[..., 2 * PANEL * factors :]
            parts[:factors] = [_by_row(u, torch.float16, rows) for u in units.split(2 * PANEL, 2)]
            blocks = blocks.flatten(1)
        blocks = blocks.unflatten(1, (columns // form.columns, -1))
        dtype = torch.int8 if form.fine else torch.float16
        size = PANEL * dtype.itemsize
        scales: list[Tensor | None] = [
            _by_row(blocks[..., size * i : size * (i + 1)], dtype, rows) for i in range(factors)
        ]
        codes = _codes(form, blocks[..., size * factors :]).permute(0, 3, 1, 2, 4).reshape(-1, columns)[:rows]
        return cls(form, codes, *(scales + [None])[:2], *parts)  # type: ignore[arg-type]


def _codes(form: BlockForm, blocks: Tensor) -> Tensor:
    """Bytes (panels, blocks, n) to integers (panels, blocks, columns / 4, 16, 4)."""
    if form.bits == 8:
        return blocks.unflatten(2, (-1, PANEL, 4))
    size = PANEL * form.columns // 2
    both = blocks[..., :size].unflatten(2, (-1, PANEL, 4))
    codes = torch.stack([both & 15, both >> 4], 3).flatten(2, 3)
    if each := form.bits - 4:
        shifts = torch.arange(0, 8, each, dtype=torch.uint8)[:, None, None]
        high = blocks[..., size:].unflatten(2, (-1, PANEL, 4)).unsqueeze(3) >> shifts & (1 << each) - 1
        codes |= high.flatten(2, 3) << 4
    return codes


def _of_groups(factors: Tensor, units: Tensor | None) -> Tensor:
    if units is None:
        return factors.float()
    return units.float().repeat_interleave(factors.shape[1] // units.shape[1], 1) * factors


def _by_row(panels: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """(panels, n, bytes of sixteen rows) to (rows, n)."""
    return panels.contiguous().view(dtype).mT.flatten(0, 1)[:rows]
