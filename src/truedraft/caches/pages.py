"""Zeros in address space alone: the operating system gives them memory page by page as they are written to, and takes
it back where they are given back.

So every slot of a cache may have room for a whole context, while rows take memory as they grow, without being copied,
and passes read the same contiguous tensors as ever. Huge pages are declined: one of 2 MiB would hold more positions of
a head than most texts have.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path

import torch

from truedraft.errors import NoRoom

LEAST = 1 << 18  # bytes of a tensor that has pages of its own; fresh ones cost microseconds each
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # in Python from 3.13 on


@cache
def available() -> bool:
    """Whether this system gives memory to pages as they are written to: Linux, unless its administrator had it count
    address space as memory (vm.overcommit_memory = 2)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return False


class Pages:
    """A tensor of zeros on the CPU.

    Attributes:
        tensor: zeros, contiguous; keeps the memory alive.

    Raises:
        NoRoom: there is no address space for it (`ulimit -v`).
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype):
        count, self._itemsize = prod(sizes), dtype.itemsize
        self._map: mmap.mmap | None = None
        if count * self._itemsize < LEAST:
            self.tensor = torch.zeros(*sizes, dtype=dtype, device="cpu")
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        try:
            self._map = mmap.mmap(-1, count * self._itemsize, flags=flags)
        except (OSError, ValueError) as error:
            raise NoRoom(f"no address space for {count * self._itemsize:,} bytes of KV cache: {error}") from error
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=dtype, count=count).view(*sizes)

    def give_back(self, first: int, last: int) -> None:
        """Give back the memory of the numbers from index `first` to `last` of the tensor as it lies in memory; they may
        be zero from then on. A page that holds others too stays."""
        if self._map is None:
            return
        start = -(-first * self._itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        end = last * self._itemsize
        if end < len(self._map):
            end -= end % mmap.PAGESIZE
        if end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
