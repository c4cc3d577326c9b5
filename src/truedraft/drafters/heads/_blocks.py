"""Heads that fill in a block of masks after the pending token in one pass, run beside the target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from truedraft.caches.rows import RowCache
from truedraft.drafters.heads._head import LearnedHead
from truedraft.drafters.heads._layers import Attend, Rotary
from truedraft.drafters.heads._reader import RowReader
from truedraft.runtime.heads import CachedAttention
from truedraft.runtime.linears import Linears
from truedraft.runtime.panels import Int8Copies
from truedraft.tree import Row


class BlockHead(LearnedHead):
    """Predicts several tokens after a pending one at once, from a block of it and masks.

    The tokens before the pending one are read by their features alone: these, fused, are inputs of keys and values in
    every layer. The block attends to all of them and to itself.

    block_size: tokens of a block, the pending one included.
    drafts: tokens that a block predicts.
    causal: whether a token of a block attends only to those of it up to its own.
    windows: per layer, the most positions between a token of a block and what it attends to; 0 for no limit.
    """

    block_size: int
    drafts: int
    causal: bool
    windows: Sequence[int]

    @abstractmethod
    def block(self, tokens: Tensor) -> Tensor:
        """(...) pending tokens to (..., block_size, H): embeddings of their blocks."""

    @abstractmethod
    def forward(self, embeds: Tensor, rotary: Rotary, attends: Sequence[Attend]) -> Tensor:
        """(rows, width, H) embeddings of one or more blocks a row to their states, of that shape.

        attends: by layer; over the features before each block, and over the block.
        """

    @abstractmethod
    def drafting(self, states: Tensor) -> Tensor:
        """(..., block_size, H) states of blocks to (..., drafts, H), those that predict."""

    def visible(self, first: Tensor, places: Tensor, window: int) -> Tensor:
        """(..., block_size, places) bool: what the tokens of blocks attend to.

        Args:
            first: (...) positions of pending tokens. places: (places,) positions: features, then the block.
        """
        at = first[..., None, None] + torch.arange(self.block_size, device=first.device)[:, None]
        last = at if self.causal else first[..., None, None] + self.block_size - 1
        within = (places <= last).expand(*at.shape[:-1], -1)
        return within & ((places - at).abs() <= window) if window else within


@dataclass(frozen=True)
class BlockNodes:
    """The nodes of a pass over one block a row, see `runtime.heads.Written`."""

    rows: Tensor
    place: Tensor
    mask: Tensor

    @property
    def extent(self) -> int:
        return self.mask.shape[-1]


class BlockPass:
    """The passes of a head in torch, over the slots of the cache that is attached."""

    name = "torch"

    def __init__(self, head: BlockHead, int8: Int8Copies | None = None):
        self.head = head
        used: list[Any] = [head, head.get_output_embeddings()]
        self._linears = Linears(nn.ModuleList(used if next(head.parameters()).device.type == "cpu" else []), int8)

    def attach(self, cache: RowCache | None) -> None:
        """Set the cache of the following passes; None detaches it."""
        self.cache = cache
        if cache is not None:
            self._linears.refresh()

    @torch.no_grad()
    def read(self, slots: Sequence[int], positions: Sequence[int], features: Tensor) -> None:
        """Write the keys and values of features, (count, layers * H of the target), at places that are positions."""
        assert self.cache is not None
        at, place = (torch.tensor(index, device=features.device) for index in (slots, positions))
        with self._linears.compiled():
            fused = self.head.fuse(features.to(self.head.dtype))[None]
            rotary = self.head.rotary(fused, place[None])
            for stored, layer in zip(self.cache.layers, self.head.blocks, strict=True):
                attention: Any = layer.self_attn
                key, value = attention.keys_values(fused, rotary)
                stored.keys[at, :, place] = key[0].transpose(0, 1)
                stored.values[at, :, place] = value[0].transpose(0, 1)

    @torch.no_grad()
    def fill(self, slots: Sequence[int], first: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(rows, drafts, draft vocabulary) logits of blocks behind what was read.

        Args:
            slots, first, tokens: of each row, its slot, and position and id of its pending token.
        """
        assert self.cache is not None
        head = self.head
        device = next(head.parameters()).device
        rows, start = torch.tensor(slots, device=device), torch.tensor(first, device=device)
        place = start[:, None] + torch.arange(head.block_size, device=device)
        places = torch.arange(max(first) + head.block_size, device=device)
        masks = {window: head.visible(start, places, window)[:, None] for window in set(head.windows)}
        attends = [
            CachedAttention(layer, BlockNodes(rows, place, masks[window]))
            for layer, window in zip(self.cache.layers, head.windows, strict=True)
        ]
        with self._linears.compiled():
            embeds = head.block(torch.tensor(tokens, device=device))
            return head.logits(head.drafting(head(embeds, head.rotary(embeds, place), attends)))


class BlockReader(RowReader):
    """A head that fills in blocks. The features of a row's token i are read at place and position i."""

    head: BlockHead

    def __init__(self, head: BlockHead, int8: Int8Copies | None = None):
        super().__init__(head, BlockPass(head, int8))

    def filled(self, rows: Sequence[Row]) -> Tensor:
        """Read what is new of rows, and fill in their blocks: (rows, drafts, draft vocabulary) logits."""
        assert self._cache is not None
        slots, positions, features = list[int](), list[int](), list[Tensor]()
        at = [self.slot_rows.index(row) for row in rows]
        for row, slot in zip(rows, at, strict=True):
            count, length = len(self._unread[id(row)]), self._cache.lengths[slot]
            features.append(self._unread[id(row)].take(count))
            slots += [slot] * count
            positions += range(length, length + count)
            self._cache.lengths[slot] += count
        self.passes.read(slots, positions, torch.cat(features))
        first = [self._cache.lengths[slot] for slot in at]
        return self.passes.fill(at, first, [row.tokens[-1] for row in rows])
