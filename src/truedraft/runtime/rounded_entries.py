"""Committed keys and values in integers of fewer bits, in the order in which the compiled pass reads them.

Keys have a scale for each of their numbers in a chunk of positions, and values one for each position, as in Liu et al.,
"KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024 (arXiv 2402.02750).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor
from torch.nn.functional import pad

from truedraft.caches.rows import RowCache, RowLayer
from truedraft.errors import NoRoom
from truedraft.runtime import native
from truedraft.runtime.native import Form, Op, OpKind
from truedraft.runtime.weights import padded_to_16

CHUNK = 128  # positions, as ROUNDED in pass.c
SOME = 4 * CHUNK  # positions that are rounded at a time, within the cache of the processor
WIDEST = 512  # numbers of a key, as MOST_ROUNDED
FORMS = {8: Form.PANEL_INT8, 4: Form.PANEL_INT4}
MOST = {8: 127, 4: 7}  # of the integers


def readable(op: Op) -> bool:
    """Whether an operation attends to keys that it can read in fewer bits: not within a window, and no latents."""
    return op.kind == OpKind.ATTEND and not op.window and not op.inner and op.head <= WIDEST


class RoundedEntries:
    """Of the rows of a cache, in the same slots: whole chunks before the last `recent` positions.

    Args:
        layers: those that are kept, see `readable`.

    Attributes:
        lengths: by slot, the first positions that are kept.

    Raises:
        NoRoom: they do not fit in free memory.
    """

    def __init__(self, whole: RowCache, layers: Collection[int], bits: int, recent: int):
        self.bits, self.recent, self.lengths = bits, recent, [0] * whole.cursor.slots
        chunks = -(-whole.cursor.capacity // CHUNK)
        numbers = sum(2 * whole.layers[at].keys[:, :, 0].numel() for at in layers) * chunks * CHUNK
        need, free = numbers * (bits + 1) // 8, psutil.virtual_memory().available  # a bit for scales
        if need > free:
            remedy = "draft by a view that reads it as it is"
            raise NoRoom(f"the KV cache in {bits} bits needs {need:,} bytes, {free:,} are free: {remedy}")
        self.layers = {at: RoundedLayer.of(whole.layers[at], chunks, bits) for at in layers}

    def follow(self, whole: RowCache, slot: int) -> None:
        """Round what was committed to a slot since it was followed last."""
        first, last = self.lengths[slot], self._before(whole.lengths[slot])
        for at in range(first, last, SOME):
            some = slice(at, min(at + SOME, last))
            for number, own in self.layers.items():
                layer = whole.layers[number]
                own.write(slot, at, layer.keys[slot, :, some], layer.values[slot, :, some])
        self.lengths[slot] = max(first, last)

    def pointed(self, op: Op, layer: int) -> Op:
        """An operation of a layer that reads these; others stay as they are."""
        return self.layers[layer].pointed(op) if readable(op) else op

    def shorten(self, slot: int, length: int) -> None:
        self.lengths[slot] = min(self.lengths[slot], self._before(length))

    def _before(self, length: int) -> int:
        """The first positions of a row of this length that are kept."""
        return max(length - self.recent, 0) // CHUNK * CHUNK

    def release(self, slot: int, rows: int) -> None:
        """Free one of so many slots in use; the last one is moved into it."""
        last = rows - 1
        if slot != last:
            for layer in self.layers.values():
                layer.move(last, slot)
        self.lengths[slot], self.lengths[last] = self.lengths[last], 0


@dataclass
class RoundedLayer:
    """keys, values: (slots, heads, chunks, bytes), each chunk in panels; those of values are of rows of 16 numbers.
    key_scales: (slots, heads, chunks, size). value_scales: (slots, heads, chunks, CHUNK)."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    bits: int

    @classmethod
    def of(cls, layer: RowLayer, chunks: int, bits: int) -> RoundedLayer:
        slots, heads, _, size = layer.keys.shape
        keys, values = (
            torch.zeros(slots, heads, chunks, CHUNK * width * bits // 8, dtype=torch.uint8)
            for width in (size, padded_to_16(size))
        )
        key_scales, value_scales = (torch.zeros(slots, heads, chunks, n, dtype=torch.float32) for n in (size, CHUNK))
        return cls(keys, values, key_scales, value_scales, bits)

    def write(self, slot: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Round keys and values, (heads, n, size), at positions from `first` on, by whole chunks."""
        at = slice(first // CHUNK, (first + keys.shape[1]) // CHUNK)
        by_number = keys.float().unflatten(1, (-1, CHUNK))
        self.key_scales[slot, :, at], rounded = _rounded(by_number, 2, self.bits)
        self._pack(rounded.flatten(0, 2), self.keys[slot, :, at])
        by_place = values.float().unflatten(1, (-1, CHUNK))
        self.value_scales[slot, :, at], rounded = _rounded(by_place, 3, self.bits)
        width = padded_to_16(values.shape[2])
        self._pack(pad(rounded.mT, (0, 0, 0, width - values.shape[2])).flatten(0, 2), self.values[slot, :, at])

    def _pack(self, rows: Tensor, to: Tensor) -> None:
        """int8 (rows, columns), of all heads, to panels."""
        rows = rows.contiguous()
        made = torch.empty(to.shape, dtype=torch.uint8)
        library = native.library()
        assert library is not None
        out, columns = rows.shape
        failure = library.truedraft_panels(
            FORMS[self.bits], rows.data_ptr(), out, columns, made.data_ptr(), torch.get_num_threads()
        )
        assert failure == 0
        to.copy_(made)

    def pointed(self, op: Op) -> Op:
        copied = Op.from_buffer_copy(op)
        copied.weight, copied.second = self.keys.data_ptr(), self.values.data_ptr()
        copied.scales, copied.second_scales = self.key_scales.data_ptr(), self.value_scales.data_ptr()
        copied.form, copied.apart = FORMS[self.bits], self.keys.shape[2] * CHUNK
        return copied

    def move(self, source: int, target: int) -> None:
        for kept in (self.keys, self.values, self.key_scales, self.value_scales):
            kept[target] = kept[source]


def _rounded(numbers: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Scales along a dimension, which is left out of them, and the integers, int8."""
    scales = numbers.abs().amax(dim) / MOST[bits]
    return scales, (numbers / scales.unsqueeze(dim)).round_().nan_to_num_(0.0).to(torch.int8)  # of zeros: zeros
