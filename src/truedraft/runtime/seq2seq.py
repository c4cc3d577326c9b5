"""The compiled passes of an encoder-decoder: the encoder's over sources, the decoder's over nodes of trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from truedraft.caches.rows import RowCache
from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.positions import Positions, by_distance
from truedraft.runtime.program import Program
from truedraft.runtime.programs import compile_seq2seq
from truedraft.runtime.weights import Copies, NotCompilable
from truedraft.tree import Prompt, Scores, Taps

CPU = torch.device("cpu")


@dataclass
class EncoderOutput(BaseModelOutput):
    """The output of an encoder, with the mask of its states, (rows, length), which decoders of sounds read there."""

    attention_mask: Tensor | None = None


class CompiledStackPass(CompiledPass):
    """The compiled pass of the encoder or the decoder, with positions from a table or as biases by distance.

    bidirectional: whether nodes attend to later ones: in the encoder, not in the decoder.
    """

    bidirectional: bool

    def __init__(self, model: PreTrainedModel, stack: Any, copied: Copies | None):
        super().__init__(model, copied)
        self._positions = Positions(stack, model.config.pad_token_id or 0)

    def _compiled(self, copied: Copies | None) -> Program:
        return compile_seq2seq(self.model, self.bidirectional, copied)

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
        first = 1 - capacity if self.bidirectional else 0
        self._biases = [by_distance(module, first, capacity) for _, module in p.biased]
        for (op, _), biases in zip(p.biased, self._biases, strict=True):
            op.bias, op.out, op.shift = biases.data_ptr(), biases.shape[1], -first


class CompiledEncoderPass(CompiledStackPass):
    """The encoder's pass, without padding. See `CompiledPass`."""

    bidirectional = True

    def __init__(self, model: Any, copied: Copies | None = None):
        super().__init__(model, model.get_encoder(), copied)

    @torch.no_grad()
    def states(self, ids: Tensor, source_mask: Tensor) -> Tensor:
        """The encoder's output for sources (rows, length) with their mask; (rows, length, H), zeros for padding.

        Raises:
            NotCompilable: the mask of a row has gaps, the encoder has fewer positions, or was changed into one that is
                not supported.
        """
        rows, length = ids.shape
        if (source_mask.diff(dim=1) != 0).sum(1).gt(2 - (source_mask[:, 0] + source_mask[:, -1]).clamp(0, 1)).any():
            raise NotCompilable("a mask has gaps")
        self.attach(RowCache(len(self.program.layer_types), rows, length))
        if self.program.positions is not None and len(self.program.positions) < length:
            raise NotCompilable("a source has more tokens than there are positions")
        nodes, counted = Nodes(), source_mask.cumsum(1) - 1 if self.program.biased else self._positions.counted(ids)
        for slot, mask in enumerate(source_mask.bool()):
            nodes.add_whole(slot, ids[slot, mask].tolist(), counted[slot, mask].tolist())
        _, encoded = self(nodes, [], hidden=(-1,))
        self.attach(None)
        states = torch.zeros(rows, length, self._hidden, dtype=self.model.dtype)
        states[source_mask.bool()] = encoded[-1].to(states.dtype)
        return states


class CrossAttentionPass(CompiledPass):
    """A pass whose nodes attend to their row's source, stored without padding."""

    seq2seq_cache: Seq2SeqCache
    greedy_chains = False

    @torch.no_grad()
    def read_source(self, states: Tensor, source_mask: Tensor) -> None:
        """Add the sources of new rows, (rows, length, H) and (rows, length), 0 for padding.

        Each is computed by itself, so that its keys and values have the same bits in any batch.
        """
        cache, first = self.seq2seq_cache, len(self.seq2seq_cache.lengths)
        cache.begin(states, source_mask)
        sources = [row[seen.bool()] for row, seen in zip(states, source_mask, strict=True)]
        for layer, (op, keys, values) in zip(cache.sources, self.program.crosses, strict=True):
            for slot, source in enumerate(sources, first):
                layer.put(slot, *(_heads(made(source), op.kv_heads) for made in (keys, values)))
        self._point()

    def _point(self) -> None:
        """Point the operations at the cached sources."""
        for layer, (op, _, _) in zip(self.seq2seq_cache.sources, self.program.crosses, strict=True):
            if layer.is_initialized:
                op.keys, op.values = layer.data_pointers
        self._variants = {}

    def _complete(self, nodes: Nodes, numbers: dict[str, int], lists: dict[str, Sequence[int]]) -> None:
        counts, sources = self.seq2seq_cache.counts, self.seq2seq_cache.source_mask.shape[1]
        numbers |= {"sources": sources, "source_slots": len(counts), "longest": max(nodes.longest, sources)}
        lists |= {"source_lengths": [counts[slot] for slot in nodes.slot], "source_slot": nodes.slot}


class CompiledSeq2SeqPass(CrossAttentionPass, CompiledStackPass):
    """The decoder's pass. See `CompiledPass`."""

    bidirectional = False

    def __init__(self, model: Any, copied: Copies | None = None):
        super().__init__(model, model.get_decoder(), copied)

    def attach(self, cache: Seq2SeqCache | None) -> None:  # type: ignore[override]
        self.seq2seq_cache = cache  # type: ignore[assignment]
        super().attach(None if cache is None else cache.rows)
        if cache is not None:
            self._point()

    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        self.read_source(*padded_sources(prompts))
        return super().prefill(prompts, taps)

    def _counted(self, prompt: Prompt) -> list[int] | None:
        return None if prompt.ids is None else self._positions.counted(prompt.ids[None])[0].tolist()


def padded_sources(prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """The states and the masks of the sources of prompts, (rows, length, H) and (rows, length), padded at the end."""
    states, masks = ([getattr(prompt, name) for prompt in prompts] for name in ("states", "source_mask"))
    return pad_sequence(states, batch_first=True), pad_sequence(masks, batch_first=True)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(length, heads * size) to (heads, length, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)
