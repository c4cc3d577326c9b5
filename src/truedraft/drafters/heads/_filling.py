"""The KV cache of a drafter that fills masks, and its passes over the rows in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from truedraft.drafters.heads._nn import attention_bias
from truedraft.runtime.filling import CompiledFillerPass
from truedraft.runtime.weights import NotCompilable
from truedraft.tree import Row


class FillerCache(ABC):
    """Keys and values by slot: of the tokens read so far, and of the encoder's output.

    rows: in the order of the slots. read: tokens of each row in the cache.
    states, source_mask: encoder states and source mask of the rows, padded; see `Prompt`.
    places: encodings of all positions up to `capacity`.
    """

    def __init__(self, filler: Any, rows: Sequence[Row], masks: int):
        prompts = [row.given for row in rows if row.given is not None]
        self.states = pad_sequence([p.states for p in prompts], batch_first=True)  # type: ignore[misc]
        self.source_mask = pad_sequence([p.source_mask for p in prompts], batch_first=True)  # type: ignore[misc]
        self.filler, self.rows, self.masks = filler, list(rows), masks
        self.read = [0] * len(rows)
        self.capacity = max(len(row.tokens) + row.room for row in rows) + masks + 1  # the last is for padding
        self.places = filler.places(torch.arange(self.capacity, device=self.states.device))

    def keep(self, rows: Sequence[Row]) -> None:
        """Free the slots of all other rows; the last slot in use is moved into each freed one."""
        for slot in reversed([slot for slot, row in enumerate(self.rows) if row not in rows]):
            last = len(self.rows) - 1
            self.release(slot, last)
            self.rows[slot], self.read[slot] = self.rows[last], self.read[last]
            self.rows.pop()
            self.read.pop()

    @abstractmethod
    def release(self, slot: int, last: int) -> None: ...

    @abstractmethod
    def filled(self) -> Tensor:
        """Read the tokens emitted since the last call and fill the masks after them: (rows, masks, V) logits."""


class CompiledFillerCache(FillerCache):
    """Runs the compiled pass.

    Raises:
        NotCompilable: there is no compiled pass for this filler.
    """

    def __init__(self, filler: Any, rows: Sequence[Row], masks: int):
        super().__init__(filler, rows, masks)
        if filler.compiled is None:
            filler.compiled = CompiledFillerPass(filler)
        self._pass: CompiledFillerPass = filler.compiled
        self._pass.begin(len(rows), self.capacity)
        self._pass.read_source(filler.placed(self.states), self.source_mask)
        self._pass.seq2seq_cache.lengths.extend([0] * len(rows))

    def release(self, slot: int, last: int) -> None:
        self._pass.seq2seq_cache.lengths[last] = self.read[last]
        self._pass.seq2seq_cache.release(slot)

    def filled(self) -> Tensor:
        texts = [(read, len(row.tokens)) for row, read in zip(self.rows, self.read, strict=True)]
        tokens = [token for row, (read, _) in zip(self.rows, texts, strict=True) for token in row.tokens[read:]]
        positions = [position for read, end in texts for position in range(read, end + self.masks)]
        parts: list[Tensor] = []
        embedded = self.filler.tokens(torch.tensor(tokens)).split([end - read for read, end in texts])
        for part in embedded:
            parts += [part, self.filler.mask_embeddings[: self.masks]]
        self.read = [end for _, end in texts]
        return self._pass.fill(texts, torch.cat(parts) + self.places.sinusoid[positions], self.masks)


class TensorFillerCache(FillerCache):
    """Runs in torch, rows padded to the longest."""

    def __init__(self, filler: Any, rows: Sequence[Row], masks: int):
        super().__init__(filler, rows, masks)
        self.sources = filler.encoder_kv(self.states)
        self.source_bias = attention_bias(self.source_mask.bool(), filler.dtype)[:, None, None]
        heads, size = filler.shape.heads, filler.shape.size
        shape = len(filler.layers), 2, len(rows), self.capacity, heads, size // heads
        self.cache = torch.zeros(shape, dtype=filler.dtype, device=self.states.device)

    def release(self, slot: int, last: int) -> None:
        self.cache[:, :, slot] = self.cache[:, :, last]
        for tensor in (self.source_bias, *(part for source in self.sources for part in source)):
            tensor[slot] = tensor[last]

    def filled(self) -> Tensor:
        count, device = len(self.rows), self.source_bias.device
        new = [row.tokens[read:] for row, read in zip(self.rows, self.read, strict=True)]
        widest = max(map(len, new))
        ids = torch.tensor([tokens + [0] * (widest - len(tokens)) for tokens in new], device=device)
        positions, limits = [], []
        for row, read, tokens in zip(self.rows, self.read, new, strict=True):
            end, idle = len(row.tokens), widest - len(tokens)
            positions.append([*range(read, end), *[self.capacity - 1] * idle, *range(end, end + self.masks)])
            limits.append([*range(read, end), *[0] * idle, *[end + self.masks - 1] * self.masks])
        extent = max(map(max, limits)) + 1
        index = torch.tensor(positions, device=device)
        limit = torch.tensor(limits, device=device)[:, None, :, None]
        mask = attention_bias(torch.arange(extent, device=device) <= limit, self.filler.dtype)
        masks = self.filler.mask_embeddings[: self.masks].expand(count, -1, -1)
        places = self.places.at(index)
        x = torch.cat([self.filler.tokens(ids), masks], 1) + places.sinusoid
        slots = torch.arange(count, device=device)[:, None]
        updates = [partial(_update, cache, slots, index, extent) for cache in self.cache]
        sources = [(keys[:count], values[:count]) for keys, values in self.sources]
        self.read = [len(row.tokens) for row in self.rows]
        return self.filler.logits(self.filler(x, places, updates, mask, sources, self.source_bias[:count], widest))


def _update(
    cache: Tensor, slots: Tensor, index: Tensor, extent: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Write new keys and values at positions `index`; return those of the first `extent` positions."""
    for stored, new in zip(cache, (keys, values), strict=True):
        stored[slots, index] = new.transpose(1, 2)
    visible = cache[:, : len(slots), :extent].transpose(2, 3)
    return visible[0], visible[1]


def filler_cache(filler: Any, rows: Sequence[Row], masks: int) -> FillerCache:
    """A cache for the compiled pass where the filler can be compiled, else for torch."""
    try:
        return CompiledFillerCache(filler, rows, masks)
    except NotCompilable:
        return TensorFillerCache(filler, rows, masks)
