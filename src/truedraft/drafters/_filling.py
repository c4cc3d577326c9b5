"""What a drafter that fills masks keeps of the rows that it follows, and its passes over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from truedraft.drafters._nn import masking
from truedraft.runtime.filling import LeanFilling
from truedraft.runtime.weights import NotCompilable
from truedraft.tree import Row


class Kept(ABC):
    """By slot: keys and values of the tokens that were read, and of the sources.

    rows: in the order of the slots. read: how many tokens of each.
    states, heard: of their sources; see `Prompt`.
    places: of all positions that there may be.
    """

    def __init__(self, filler: Any, rows: Sequence[Row], masks: int):
        prompts = [row.given for row in rows if row.given is not None]
        self.states = pad_sequence([p.states for p in prompts], batch_first=True)  # type: ignore[misc]
        self.heard = pad_sequence([p.heard for p in prompts], batch_first=True)  # type: ignore[misc]
        self.filler, self.rows, self.masks = filler, list(rows), masks
        self.read = [0] * len(rows)
        self.capacity = max(len(row.tokens) + row.room for row in rows) + masks + 1  # the last is for padding
        self.places = filler.places(torch.arange(self.capacity, device=self.states.device))

    def keep(self, rows: Sequence[Row]) -> None:
        """Free the slots of all but these rows; the last one in use takes a freed slot's place."""
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
        """Read what rows said since, and fill the masks behind it: (rows, masks, V) logits."""


class KeptCompiled(Kept):
    """By the compiled pass.

    Raises:
        NotCompilable: there is none for this filler.
    """

    def __init__(self, filler: Any, rows: Sequence[Row], masks: int):
        super().__init__(filler, rows, masks)
        if filler.compiled is None:
            filler.compiled = LeanFilling(filler)
        self._pass: LeanFilling = filler.compiled
        self._pass.begin(len(rows), self.capacity)
        self._pass.hear(filler.placed(self.states), self.heard)
        self._pass.pairs.lengths.extend([0] * len(rows))

    def release(self, slot: int, last: int) -> None:
        self._pass.pairs.lengths[last] = self.read[last]
        self._pass.pairs.release(slot)

    def filled(self) -> Tensor:
        texts = [(read, len(row.tokens)) for row, read in zip(self.rows, self.read, strict=True)]
        tokens = [token for row, (read, _) in zip(self.rows, texts, strict=True) for token in row.tokens[read:]]
        spots = [place for read, end in texts for place in range(read, end + self.masks)]
        parts: list[Tensor] = []
        made = self.filler.tokens(torch.tensor(tokens)).split([end - read for read, end in texts])
        for part in made:
            parts += [part, self.filler.mask_embeddings[: self.masks]]
        self.read = [end for _, end in texts]
        return self._pass.fill(texts, torch.cat(parts) + self.places.wave[spots], self.masks)


class KeptTensors(Kept):
    """By torch, rows padded to the widest."""

    def __init__(self, filler: Any, rows: Sequence[Row], masks: int):
        super().__init__(filler, rows, masks)
        self.sources = filler.heard(self.states)
        self.hears = masking(self.heard.bool(), filler.dtype)[:, None, None]
        heads, size = filler.shape.heads, filler.shape.size
        shape = len(filler.layers), 2, len(rows), self.capacity, heads, size // heads
        self.cache = torch.zeros(shape, dtype=filler.dtype, device=self.states.device)

    def release(self, slot: int, last: int) -> None:
        self.cache[:, :, slot] = self.cache[:, :, last]
        for kept in (self.hears, *(part for source in self.sources for part in source)):
            kept[slot] = kept[last]

    def filled(self) -> Tensor:
        count, device = len(self.rows), self.hears.device
        new = [row.tokens[read:] for row, read in zip(self.rows, self.read, strict=True)]
        widest = max(map(len, new))
        ids = torch.tensor([tokens + [0] * (widest - len(tokens)) for tokens in new], device=device)
        spots, limits = [], []
        for row, read, tokens in zip(self.rows, self.read, new, strict=True):
            end, idle = len(row.tokens), widest - len(tokens)
            spots.append([*range(read, end), *[self.capacity - 1] * idle, *range(end, end + self.masks)])
            limits.append([*range(read, end), *[0] * idle, *[end + self.masks - 1] * self.masks])
        view = max(map(max, limits)) + 1
        place = torch.tensor(spots, device=device)
        limit = torch.tensor(limits, device=device)[:, None, :, None]
        mask = masking(torch.arange(view, device=device) <= limit, self.filler.dtype)
        masks = self.filler.mask_embeddings[: self.masks].expand(count, -1, -1)
        places = self.places.at(place)
        x = torch.cat([self.filler.tokens(ids), masks], 1) + places.wave
        slots = torch.arange(count, device=device)[:, None]
        keeps = [partial(_kept, cache, slots, place, view) for cache in self.cache]
        sources = [(keys[:count], values[:count]) for keys, values in self.sources]
        self.read = [len(row.tokens) for row in self.rows]
        return self.filler.logits(self.filler(x, places, keeps, mask, sources, self.hears[:count], widest))


def _kept(
    cache: Tensor, slots: Tensor, place: Tensor, view: int, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    for kept, new in zip(cache, (keys, values), strict=True):
        kept[slots, place] = new.transpose(1, 2)
    seen = cache[:, : len(slots), :view].transpose(2, 3)
    return seen[0], seen[1]


def kept(filler: Any, rows: Sequence[Row], masks: int) -> Kept:
    """Compiled where it can be."""
    try:
        return KeptCompiled(filler, rows, masks)
    except NotCompilable:
        return KeptTensors(filler, rows, masks)
