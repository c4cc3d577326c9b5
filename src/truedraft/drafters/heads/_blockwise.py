"""Heads that predict a block of tokens at once, from masks behind a pending token: their training, and drafts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from truedraft.drafters._learned import Batch, Metrics
from truedraft.drafters._losses import IGNORED
from truedraft.drafters._positions import PositionsDrafter
from truedraft.drafters._walking import Walk
from truedraft.drafters.heads._drafter import TrainedDrafter
from truedraft.drafters.heads._unroll import HeadLearner
from truedraft.tree import Row

ANCHORS = 64  # blocks of a text that an evaluation fills in at a time


class BlockLearner(HeadLearner):
    """Training on the target's responses, by blocks that begin at random tokens of them.

    Subclasses have the knobs anchors (blocks of a text in a step) and decay (weight of a position relative to the one
    before).
    """

    anchors: int
    decay: float

    @abstractmethod
    def block_logits(self, batch: Batch, anchors: Tensor) -> Tensor:
        """(rows, blocks, drafts, draft vocabulary) logits of blocks at anchors, (rows, blocks) places of their pending
        tokens."""

    def loss(self, batch: Batch) -> Tensor:
        eligible = batch.loss_mask[:, :-1] & batch.loss_mask[:, 1:]
        eligible[:, 0] = False
        most = min(self.anchors, int(eligible.sum(1).max()))
        if not most:
            return torch.zeros(())
        order = torch.rand(eligible.shape, device=eligible.device).masked_fill(~eligible, -1.0)
        chosen, anchors = order.topk(most)
        logits, labels = self._filled(batch, anchors.clamp_min(1))
        counted = (labels != IGNORED) & (chosen >= 0)[..., None]
        weight = self.decay ** torch.arange(labels.shape[-1], device=labels.device).expand_as(labels)[counted]
        losses = cross_entropy(logits[counted].float(), labels[counted], reduction="none")
        return (weight * losses).sum() / weight.sum().clamp_min(1e-9)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Acceptance of chains of the likeliest tokens by position, over all positions of the responses, and the tokens
        per pass of decoding them with such drafts."""
        head: Any = self.module
        walk = Walk(head.drafts)
        for text in (text for batch in batches for text in batch.split(1)):
            ((first, length),) = text.spans()
            reach = [0] * first
            for begin in range(first + 1, length - 1, ANCHORS):
                anchors = torch.arange(begin, min(begin + ANCHORS, length - 1), device=text.ids.device)
                logits, labels = self._filled(text, anchors[None])
                reach += (logits.argmax(-1) == labels)[0].long().cumprod(-1).sum(-1).tolist()
            walk.add(reach, first, length)
        return walk.metrics()

    def _filled(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of blocks, and their labels, `IGNORED` where there is none."""
        head: Any = self.module
        length = batch.ids.shape[1]
        predicted = anchors[..., None] + torch.arange(1, head.drafts + 1, device=anchors.device)
        at = predicted.clamp_max(length - 1).flatten(1)
        counted = batch.loss_mask.gather(1, at) & (predicted < length).flatten(1)
        labels = self._labels(batch.ids.gather(1, at), counted).unflatten(1, (anchors.shape[1], -1))
        return self.block_logits(batch, anchors), labels


class BlockDrafter(PositionsDrafter, TrainedDrafter):
    """A drafter with a head that fills in blocks. Fields of every subclass: those of both."""

    def start(self, rows: Sequence[Row]) -> None:
        self.reader.start(rows, self.head.block_size)

    def deepest(self, row: Row) -> int:
        """None where the head has no features of a row's tokens."""
        read = self.reader.tokens_read(row, 0) is not None
        return min(self.depth, self.head.drafts) if read else 0
