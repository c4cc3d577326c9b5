"""Passes of an encoder-decoder through the decoder's own forward, with the encoder's output for the sources."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.errors import Refused
from truedraft.runtime.forward import ForwardPass, LinearsPass, Output
from truedraft.runtime.modules import source_width
from truedraft.runtime.padded import Padded
from truedraft.runtime.positions import Positions
from truedraft.runtime.seq2seq import EncoderOutput, padded_sources
from truedraft.runtime.tapping import one_token
from truedraft.tree import DraftTree, Prompt, Scores, Taps
from truedraft.views._base import Reduction, View


class Seq2SeqPass(ForwardPass):
    """See `ForwardPass`. The decoder computes positions from indices in the cache, so those of a tree's nodes are
    substituted (`positions.py`)."""

    cache: Seq2SeqCache

    _positions: Positions

    def __init__(self, model: PreTrainedModel, layer_types: Sequence[str], window: int | None):
        super().__init__(model, layer_types, window)
        self._masks_sources = "attention_mask" in inspect.signature(model.forward).parameters  # not with audio sources

    def _substituted(self) -> Positions:
        return Positions.of(self.model)

    def read_source(self, states: Tensor, source_mask: Tensor) -> None:
        """Add the sources of new rows; see `CrossAttentionPass`. The first pass computes their keys and values."""
        self.cache.begin(states, source_mask)

    def _read(self, batch: Sequence[Prompt], most: int, taps: Taps) -> Scores:
        self.read_source(*padded_sources(batch))
        return super()._read(batch, most, taps)

    def reduced(self, view: View) -> Reduction:
        raise Refused(
            f"{type(self.model).__name__} cannot run under a view by the {self.name}, in which a row's first pass "
            "computes the keys of its source in every layer: views of encoder-decoders need the compiled pass"
        )

    def _one_token(self) -> dict[str, Any]:
        width = source_width(self.model)
        source = torch.zeros(1, 1, width, dtype=self.model.dtype, device=self.device)
        return {
            "encoder_outputs": EncoderOutput(last_hidden_state=source),
            "decoder_input_ids": one_token(self.model),
        }

    def _unmasked(self, trees: Sequence[DraftTree]) -> bool:
        return False

    def forward_nodes(self, nodes: Padded, extent: int, taps: Taps, embeds: Tensor | None = None) -> Output:
        if all(self.cache.is_updated.values()):
            self.cache.show()
        return super().forward_nodes(nodes, extent, taps, embeds)

    def call(self, inputs: dict[str, Any], mask: Any, positions: Tensor) -> Any:
        cursor, cache = self.cache.cursor, self.cache
        rows = slice(cursor.first, cursor.last)
        given = {"attention_mask": cache.source_mask[rows]} if self._masks_sources else {}
        if self._positions.given:
            given["decoder_position_ids"] = positions
        return self.model(
            encoder_outputs=EncoderOutput(cache.states[rows], attention_mask=cache.source_mask[rows]),
            decoder_input_ids=inputs["input_ids"],
            decoder_attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            **given,
        )


class Seq2SeqLinearsPass(LinearsPass, Seq2SeqPass):
    """The same with the model's linear layers computed by compiled code."""
