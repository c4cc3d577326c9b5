"""Blocks of GGUF as integers with scales: `BLOCKS`, by the name of their type, and the `FORMS` of some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime.checkpoints._base import Integers
from truedraft.runtime.panel_blocks import EACH_BYTE, BlockForm, Blocks

BLOCKS: dict[str, Callable[[Tensor], Integers]] = {}  # of a matrix of bytes (out, blocks * size)
FORMS: dict[str, BlockForm] = {}  # of the types that compiled products read as they are in the file

Read = Callable[[Tensor], tuple[Tensor | None, ...]]


def _block(name: str, size: int, form: BlockForm | None = None) -> Callable[[Read], Read]:
    """A type of blocks of `size` bytes.

    Its function maps blocks (n, size) to what `Blocks` has of a form, each (n, ...). Without a form, to values of eight
    bits (n, columns), signed or wrapped around, scales (n, groups) in fp32 and perhaps offsets (n, groups).
    """

    def of(read: Read) -> Read:
        def parts(rows: Tensor) -> Iterator[Any]:
            return (None if part is None else part.reshape(len(rows), -1) for part in read(rows.reshape(-1, size)))

        def plain(rows: Tensor) -> Integers:
            values, *factors = parts(rows)
            return Integers(values.view(torch.int8), *factors)

        def blocks(rows: Tensor) -> Blocks:
            assert form is not None
            return Blocks(form, *parts(rows))

        BLOCKS[name] = plain if form is None else lambda rows: Integers(*blocks(rows).integers())
        if form is not None:
            FORMS[name] = form
        return read

    return of


@_block("Q4_0", 18, BlockForm(4))
def _q4_0(b: Tensor) -> tuple[Tensor, ...]:
    return _fields(b[:, 2:], 4, 16), _half(b, 0)


@_block("Q4_1", 20, BlockForm(4, offset=True))
def _q4_1(b: Tensor) -> tuple[Tensor, ...]:
    return _fields(b[:, 4:], 4, 16), _half(b, 0), _half(b, 2)


@_block("Q5_0", 22, BlockForm(5))
def _q5_0(b: Tensor) -> tuple[Tensor, ...]:
    return _fields(b[:, 6:], 4, 16) + 16 * _bits(b[:, 2:6]), _half(b, 0)


@_block("Q5_1", 24, BlockForm(5, offset=True))
def _q5_1(b: Tensor) -> tuple[Tensor, ...]:
    return _fields(b[:, 8:], 4, 16) + 16 * _bits(b[:, 4:8]), _half(b, 0), _half(b, 2)


@_block("Q8_0", 34, BlockForm(8))
def _q8_0(b: Tensor) -> tuple[Tensor, ...]:
    return b[:, 2:] + 128, _half(b, 0)


@_block("IQ4_NL", 18, BlockForm(4, table=True))
def _iq4_nl(b: Tensor) -> tuple[Tensor, ...]:
    return _fields(b[:, 2:], 4, 16), _half(b, 0)


@_block("IQ4_XS", 136, BlockForm(4, fine=True, table=True))
def _iq4_xs(b: Tensor) -> tuple[Tensor | None, ...]:
    scales = _fields(b[:, 4:8], 4, 1) + 16 * _fields(b[:, 2:4], 2, 1) - 32
    return _fields(b[:, 8:], 4, 16), scales.view(torch.int8), None, _half(b, 0)


@_block("Q2_K", 84)
def _q2_k(b: Tensor) -> tuple[Tensor, ...]:
    scales, least = _half(b, 80).float() * (b[:, :16] & 15), _half(b, 82).float() * (b[:, :16] >> 4)
    return _fields(b[:, 16:80], 2, 32), scales, -least


@_block("Q3_K", 110)
def _q3_k(b: Tensor) -> tuple[Tensor, ...]:
    scales = _fields(b[:, 96:104], 4, 8) + 16 * _fields(b[:, 104:108], 2, 4) - 32
    values = _fields(b[:, 32:96], 2, 32) + 4 * _fields(b[:, :32], 1, 32) - 4
    return values, _half(b, 108).float() * scales.view(torch.int8)


@_block("Q4_K", 144, BlockForm(4, offset=True, fine=True))
def _q4_k(b: Tensor) -> tuple[Tensor, ...]:
    return _fields(b[:, 16:], 4, 32), *_of_eight(b), _half(b, 0), -_half(b, 2)


@_block("Q5_K", 176, BlockForm(5, offset=True, fine=True))
def _q5_k(b: Tensor) -> tuple[Tensor, ...]:
    values = _fields(b[:, 48:], 4, 32) + 16 * _fields(b[:, 16:48], 1, 32)
    return values, *_of_eight(b), _half(b, 0), -_half(b, 2)


@_block("Q6_K", 210, BlockForm(6, fine=True))
def _q6_k(b: Tensor) -> tuple[Tensor | None, ...]:
    values = _fields(b[:, :128], 4, 64) + 16 * _fields(b[:, 128:192], 2, 32)
    return values, b[:, 192:208].view(torch.int8), None, _half(b, 208)


def _half(b: Tensor, at: int) -> Tensor:
    """The number of 16 bits at a byte of each block, as (n, 1)."""
    return b[:, at : at + 2].contiguous().view(torch.float16)


def _fields(part: Tensor, bits: int, width: int) -> Tensor:
    """Numbers of some bits: the lowest of `width` bytes, then the next of the same bytes, and so on."""
    most, shifts = (1 << bits) - 1, torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    if width % 4:
        return (part.unflatten(1, (-1, 1, width)) >> shifts & most).flatten(1)
    fours = part.contiguous().view(torch.int32).unflatten(1, (-1, 1, width // 4))  # four bytes at once
    return (fours >> shifts & EACH_BYTE * most).flatten(1).view(torch.uint8)


def _bits(part: Tensor) -> Tensor:
    """The bits of each byte, the lowest first."""
    return (part[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _of_eight(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and least values of eight groups: numbers of six bits, of which the last four pairs are split."""
    low, high, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, rest & 15 | low >> 6 << 4], 1)
    least = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], 1)
    return scales.view(torch.int8), least.view(torch.int8)
