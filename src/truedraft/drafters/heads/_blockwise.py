"""Training and drafts of heads that predict a block of tokens at once, from masks behind a pending token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from truedraft.drafters._candidates import candidates
from truedraft.drafters._growing import position_laws
from truedraft.drafters._learned import Batch, Metrics
from truedraft.drafters._losses import IGNORED
from truedraft.drafters._trees import likeliest_positions
from truedraft.drafters.heads._drafter import TrainedDrafter
from truedraft.drafters.heads._unroll import HeadLearner
from truedraft.drafters.heads._walking import Walk
from truedraft.tree import DraftTree, Draws, Row

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
            length, first = int(text.mask.sum()), max(int(text.loss_mask[0].int().argmax()) - 1, 0)
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


class BlockDrafter(TrainedDrafter):
    """A drafter all of whose positions are predicted at once: chains, or trees of the likeliest paths, with positions
    taken as independent.

    Fields of every subclass: those of `LearnedDrafter`, depth (positions at most), top_k (tokens of a position, 1 for a
    chain), nodes (of a tree), drawn (a chain drawn from the head, for rules that verify such drafts).
    """

    prior_confidence = 0.7
    depth: int
    top_k: int
    nodes: int
    drawn: bool

    @abstractmethod
    def filled(self, rows: Sequence[Row], depths: Sequence[int]) -> Tensor:
        """(rows, positions, draft vocabulary) logits of the next tokens, at least `depths` of them."""

    @property
    def width(self) -> int:
        return self.depth if self.top_k == 1 else max(self.nodes, self.depth)

    @property
    def draws(self) -> Draws:
        return "one" if self.drawn else "certain"

    def start(self, rows: Sequence[Row]) -> None:
        self.reader.start(rows, self.head.block_size)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        drafts = [DraftTree.chain(row.tokens[-1], (), ()) for row in rows]
        deepest = [min(self._deepest(row), most) for row, most in zip(rows, budget, strict=True)]
        if asked := [i for i, depth in enumerate(deepest) if depth > 0]:
            some = [rows[i] for i in asked]
            logits = self.filled(some, [deepest[i] for i in asked])[:, : max(deepest)].float()
            if not self._vocabulary.suffices(some) or self.drawn:
                logits = self._vocabulary.spread(logits)
            for i, laws in zip(asked, position_laws(some, logits), strict=True):
                drafts[i] = self._drafted(rows[i], laws[: deepest[i]], budget[i])
        return drafts

    def _deepest(self, row: Row) -> int:
        """Positions that may be drafted; none where the head has no features of a row's tokens."""
        read = self.reader.tokens_read(row, 0) is not None
        return min(self.depth, self.head.drafts, row.room - row.step - 1) if read else 0

    def _drafted(self, row: Row, laws: Tensor, most: int) -> DraftTree:
        """A row's draft of at most `most` nodes. laws: (positions, V)."""
        if self.drawn and self.preferred(row) == "law":
            return _drawn(row, laws)
        found = candidates(self, row, laws, range(len(laws)), self.top_k, self._vocabulary)
        most = most if self.top_k == 1 else min(most, self.nodes)
        return self._calibration.proposed(row, likeliest_positions(row.tokens[-1], found, most, row.ends))


def _drawn(row: Row, laws: Tensor) -> DraftTree:
    """A chain whose tokens are drawn from the distributions of their positions, (positions, V), independently."""
    tokens: list[int] = []
    for law in laws:
        if not law.any() or (tokens and tokens[-1] in row.ends):
            break
        tokens += row.request.chance.draw(law, row)
    chain = DraftTree.chain(row.tokens[-1], tokens)
    return chain.replaced(dist=(*laws[: len(tokens)], None), draws="one") if tokens else chain
