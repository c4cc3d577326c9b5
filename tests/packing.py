"""Panels that have their scales within them, packed by torch: what compiled code has to make of a file of GGUF."""

from __future__ import annotations

from functools import reduce
from operator import or_

import torch
from torch import Tensor
from torch.nn.functional import pad

from truedraft.runtime.panel_blocks import EACH_BYTE, PANEL, SUPER, Blocks


def packed(blocks: Blocks) -> Tensor:
    """(panels, bytes) uint8, the last panel filled up with zeros."""
    form, factors = blocks.form, [blocks.scales] if blocks.offsets is None else [blocks.scales, blocks.offsets]
    made = torch.cat([*map(_by_panel, factors), _integers(blocks)], 2)
    if blocks.units is not None:
        units = [blocks.units] if blocks.offset_units is None else [blocks.units, blocks.offset_units]
        made = made.unflatten(1, (-1, SUPER // form.columns)).flatten(2)
        made = torch.cat([*map(_by_panel, units), made], 2)
    return made.flatten(1)


def _integers(blocks: Blocks) -> Tensor:
    """(panels, blocks, bytes): four columns of a panel side by side, their lowest four bits first."""
    form, width = blocks.form, blocks.codes.shape[1]
    codes = pad(blocks.codes, (0, 0, 0, -len(blocks.codes) % PANEL)).view(torch.int32)  # four columns at once
    fours = codes.view(-1, PANEL, width // form.columns, form.columns // 4).permute(0, 2, 3, 1).contiguous()
    if form.bits < 8:
        low, high = fours & EACH_BYTE * 15, fours >> 4 & EACH_BYTE * 15
        parts = [low[:, :, ::2] | low[:, :, 1::2] << 4]
        if each := form.bits - 4:
            apart = 8 // each
            parts.append(reduce(or_, (high[:, :, k::apart] << each * k for k in range(apart))))
        fours = torch.cat(parts, 2)
    return fours.view(torch.uint8).flatten(2)


def _by_panel(factors: Tensor) -> Tensor:
    """(out, n) to (panels, n, bytes of sixteen rows)."""
    whole = pad(factors, (0, 0, 0, -len(factors) % PANEL)).unflatten(0, (-1, PANEL))
    return whole.mT.contiguous().view(torch.uint8)
