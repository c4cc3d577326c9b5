"""The compiled passes of an encoder-decoder: over its sources, and over the nodes of its decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.pairs import PairCache
from truedraft.caches.rows import RowCache
from truedraft.runtime.compiled import CompiledPass, Nodes, array
from truedraft.runtime.native import Pass
from truedraft.runtime.positions import Positions, by_distance
from truedraft.runtime.program import Program
from truedraft.runtime.programs import compile_seq2seq
from truedraft.runtime.weights import NotCompilable
from truedraft.tree import Prompt, Scores, Taps

CPU = torch.device("cpu")


class LeanStackPass(CompiledPass):
    """The compiled pass of one of the two stacks, whose positions come from a table or as biases by distance.

    ahead: whether a node sees what follows it: of the encoder, not of the decoder.
    """

    ahead: bool

    def __init__(self, model: PreTrainedModel, stack: Any):
        super().__init__(model)
        self._positions = Positions(stack, model.config.pad_token_id or 0)

    def _compiled(self) -> Program:
        return compile_seq2seq(self.model, encoder=self.ahead)

    @torch.no_grad()
    def attach(self, cache: RowCache | None) -> None:
        super().attach(cache)
        if cache is None:
            return
        p, capacity = self.program, cache.cursor.capacity
        if (table := self._positions.table(capacity, CPU)) is not None:
            positions, blank = table
            if blank is not None and blank.any():
                raise NotCompilable("padding has a position of its own")
            p.place(positions.contiguous(), blank=-1 if blank is None else self._positions.pad)
        first = 1 - capacity if self.ahead else 0
        self._biases = [by_distance(module, first, capacity) for _, module in p.biased]
        for (op, _), biases in zip(p.biased, self._biases, strict=True):
            op.bias, op.out, op.shift = biases.data_ptr(), biases.shape[1], -first


class CompiledEncoderPass(LeanStackPass):
    """See `CompiledPass`: padding takes no part."""

    ahead = True

    def __init__(self, model: Any):
        super().__init__(model, model.get_encoder())

    @torch.no_grad()
    def states(self, ids: Tensor, heard: Tensor) -> Tensor:
        """What the encoder says to sources (rows, length) with their mask; (rows, length, H), zeros for padding.

        Raises:
            NotCompilable: the mask of a row has gaps, the encoder has fewer positions, or was changed into one that is
                not known.
        """
        rows, length = ids.shape
        if (heard.diff(dim=1) != 0).sum(1).gt(2 - (heard[:, 0] + heard[:, -1]).clamp(0, 1)).any():
            raise NotCompilable("a mask has gaps")
        self.attach(RowCache(len(self.program.layer_types), rows, length))
        if self.program.positions is not None and len(self.program.positions) < length:
            raise NotCompilable("a source has more tokens than there are positions")
        nodes, counted = Nodes(), heard.cumsum(1) - 1 if self.program.biased else self._positions.counted(ids)
        for slot, mask in enumerate(heard.bool()):
            nodes.add_whole(slot, ids[slot, mask].tolist(), counted[slot, mask].tolist())
        _, said = self(nodes, [], hidden=(-1,))
        self.attach(None)
        states = torch.zeros(rows, length, self._hidden, dtype=self.model.dtype)
        states[heard.bool()] = said[-1].to(states.dtype)
        return states


class Hearing(CompiledPass):
    """A pass whose nodes see their row's source, which stands together at the front, without padding."""

    pairs: PairCache

    @torch.no_grad()
    def hear(self, states: Tensor, heard: Tensor) -> None:
        """The sources of the next rows, (rows, length, H) and (rows, length), 0 for padding."""
        cache, first = self.pairs, len(self.pairs.lengths)
        order = (heard == 0).sort(dim=1, stable=True).indices
        cache.begin(states, heard)
        cache.cursor.first, cache.cursor.last = first, first + len(states)
        together = states.gather(1, order[:, :, None].expand_as(states))
        for layer, (op, keys, values) in zip(cache.sources, self.program.crosses, strict=True):
            layer.update(_heads(keys(together), op.heads), _heads(values(together), op.heads))
            op.keys, op.values = layer.addresses
        self._variants = {}

    def _complete(self, given: Pass, nodes: Nodes) -> None:
        counts = self.pairs.counts
        given.sources, given.heard = self.pairs.states.shape[1], array([counts[slot] for slot in nodes.slot])
        given.longest = max(nodes.longest, given.sources)


class CompiledSeq2SeqPass(Hearing, LeanStackPass):
    """The decoder's. See `CompiledPass`."""

    ahead = False

    def __init__(self, model: Any):
        super().__init__(model, model.get_decoder())

    def attach(self, cache: PairCache | None) -> None:  # type: ignore[override]
        if cache is not None:
            self.pairs = cache
        super().attach(None if cache is None else cache.rows)

    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        self.hear(stacked(prompts, "states"), stacked(prompts, "heard"))
        return super().prefill(prompts, taps)

    def _counted(self, prompt: Prompt) -> list[int] | None:
        return None if prompt.ids is None else self._positions.counted(prompt.ids[None])[0].tolist()


def stacked(prompts: Sequence[Prompt], name: str) -> Tensor:
    """What prompts have of one name, together."""
    return torch.stack([getattr(prompt, name) for prompt in prompts])


def _heads(x: Tensor, heads: int) -> Tensor:
    """(rows, length, heads * size) to (rows, heads, length, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
