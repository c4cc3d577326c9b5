"""Memory for copies of weights, in large pages of the processor where the system has them.

A pass of one token reads every weight once. In pages of 4 KB the processor spends a good part of that time on looking
up where they are: in pages of 2 MB, one thread of a virtual machine reads 1.5 times as many bytes per second. Linux
makes them for memory that asks for them, wherever "transparent huge pages" are not switched off.

Matrices lie one after another in chunks, since many a matrix is smaller than such a page; a chunk is given back with
the last of its matrices.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from weakref import ReferenceType, ref

import torch
from torch import Tensor

PAGE = 1 << 21
CHUNK = 16 * PAGE
LEAST = 1 << 16  # bytes of what is worth it
LINE = 64  # bytes to which a matrix is aligned

_lock = threading.Lock()
_chunk: ReferenceType[mmap.mmap] | None = None  # the latest one, and the bytes of it that are taken
_taken = 0


def empty(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor on the CPU whose numbers are not set, or are zeros."""
    count = math.prod(sizes)
    size = count * dtype.itemsize
    if size < LEAST or not sys.platform.startswith("linux"):
        return torch.empty(*sizes, dtype=dtype)
    memory, start = _room(size)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(*sizes)


def _room(size: int) -> tuple[mmap.mmap, int]:
    """A chunk, and where a matrix of `size` bytes lies in it; large matrices have one of their own."""
    global _chunk, _taken
    if size > CHUNK // 2:
        return _mapped(size)
    with _lock:
        memory = None if _chunk is None else _chunk()
        if memory is None or _taken + size > len(memory):
            memory, _taken = _mapped(CHUNK)
            _chunk = ref(memory)
        start = _taken
        _taken = -(-(start + size) // LINE) * LINE
        return memory, start


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """New memory in large pages, and where the first of these begins: at least `size` bytes follow."""
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % PAGE
