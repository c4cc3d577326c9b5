"""Memory in large pages: every matrix has its own, and it is given back with the last of a chunk."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from truedraft.runtime import large_pages
from truedraft.runtime.large_pages import CHUNK, LEAST, LINE, PAGE

SIZES = [(3,), (LEAST // 4, 1), (5, LEAST // 4 + 3), (700, 999), (CHUNK // 8, 3), (CHUNK // 4 + 1, 1), (0, 7)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.uint8]


def made(k: int) -> torch.Tensor:
    return large_pages.empty(SIZES[k % len(SIZES)], DTYPES[k % len(DTYPES)])


def test_no_matrix_lies_in_another() -> None:
    """Of several threads, which pack weights at once."""
    with ThreadPoolExecutor(8) as pool:
        matrices = list(pool.map(made, range(70)))
    for k, matrix in enumerate(matrices):
        assert matrix.shape == SIZES[k % len(SIZES)] and matrix.dtype == DTYPES[k % len(DTYPES)]
        assert matrix.is_contiguous() and not matrix.data_ptr() % LINE
        matrix.fill_(k + 1)
    assert all((matrix == k + 1).all() for k, matrix in enumerate(matrices))
    spans = sorted((matrix.data_ptr(), matrix.data_ptr() + matrix.nbytes) for matrix in matrices if matrix.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are those of Linux")
def test_chunks_are_asked_for_in_large_pages_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    advised, chunks = list[tuple[int, ...]](), list[weakref.ref[mmap.mmap]]()

    class Noted(mmap.mmap):
        def madvise(self, *advice: int) -> None:  # type: ignore[override]
            advised.append(advice)
            chunks.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Noted)
    monkeypatch.setattr(large_pages, "_chunk", None)
    whole = large_pages.empty((CHUNK,), torch.uint8)
    parts = [large_pages.empty((CHUNK // 4,), torch.uint8) for _ in range(5)]
    assert advised == [(mmap.MADV_HUGEPAGE,)] * 3, "a large matrix, and two chunks for five of a quarter"
    assert not whole.data_ptr() % PAGE and not parts[0].data_ptr() % PAGE and not parts[4].data_ptr() % PAGE
    assert parts[3].data_ptr() - parts[0].data_ptr() == 3 * CHUNK // 4
    del whole, parts[1:3]
    gc.collect()
    assert [chunk() is None for chunk in chunks] == [True, False, False]
    parts.clear()
    gc.collect()
    assert all(chunk() is None for chunk in chunks)
    assert large_pages.empty((CHUNK // 4,), torch.uint8).sum() == 0


def test_other_systems_have_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages.sys, "platform", "darwin")
    monkeypatch.setattr(large_pages, "_room", None)
    assert large_pages.empty((PAGE,), torch.bfloat16).shape == (PAGE,)
