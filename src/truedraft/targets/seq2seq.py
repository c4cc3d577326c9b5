"""Encoder-decoders as targets: `generate` runs the encoder, once; the decoder scores trees like any other.

Keys and values of the sources are made by the first pass of a row and kept until it leaves. The decoder is the model's
own, with explicit masks and, since it counts positions by place in the cache, with the positions of the nodes handed to
it (`positions.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from truedraft.caches.pairs import PairCache
from truedraft.errors import Refused
from truedraft.runtime.linears import Linears
from truedraft.runtime.pair_programs import layers_of
from truedraft.runtime.pairs import CompiledEncoderPass, CompiledSeq2SeqPass, stacked
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.decoder import DecoderTarget, check_room
from truedraft.targets.padded import Padded
from truedraft.targets.positions import Positions
from truedraft.targets.stock import ForwardPass
from truedraft.tree import DraftTree, Prompt, Row, Scores, Taps, joined

OWN = {"encoder_outputs", "inputs_embeds", "input_features", "output_attentions", "output_hidden_states"}
SOURCE = 32  # positions of a source that passes are measured with


class Seq2SeqPass(ForwardPass):
    """The forward of an encoder-decoder behind its encoder, called as it is, its linear layers by compiled code."""

    cache: PairCache  # type: ignore[assignment]

    def __init__(self, model: PreTrainedModel, compiled: bool):
        super().__init__(model, ["full_attention"] * layers_of(model.get_decoder()), None)
        self._positions = Positions(model.get_decoder(), model.config.pad_token_id or 0)
        self._hears = "attention_mask" in inspect.signature(model.forward).parameters  # not of sounds
        self._linears = Linears(model) if compiled else None
        self.name = "transformers forward"
        if self._linears:
            self.name += " with compiled linear layers"

    def attach(self, cache: PairCache | None) -> None:  # type: ignore[override]
        super().attach(cache)  # type: ignore[arg-type]
        if cache is not None:
            limit = positions_of(self.model)
            count = cache.cursor.capacity if limit is None else min(cache.cursor.capacity, limit)
            self._positions.refresh(count, self.device)
            if self._linears is not None:
                self._linears.refresh()

    def hear(self, states: Tensor, heard: Tensor) -> None:
        """The sources of the next rows; see `Hearing`. Their keys are made by the first pass."""
        self.cache.begin(states, heard)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        cursor = self.cache.cursor
        parts: list[Scores] = []
        for length, group in groupby(prompts, len):
            batch = list(group)
            first = len(cursor.lengths)
            states, heard, ids = (stacked(batch, name) for name in ("states", "heard", "ids"))
            self.hear(states, heard)
            cursor.lengths += [0] * len(batch)
            cursor.begin(first, first + len(batch), length, self.device)
            out = self.forward({"input_ids": ids}, None, ids, taps)
            hidden = {layer: list(out.decoder_hidden_states[layer]) for layer in taps.hidden}
            parts.append(Scores(out.logits[:, -1:], hidden, [length - 1] * len(batch)))
            cursor.lengths[first:] = [length - 1] * len(batch)  # the root is committed with its path
        return joined(parts)

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree], taps: Taps) -> Scores:
        cursor = self.cache.cursor
        cursor.begin(0, len(trees), max(map(len, trees)), self.device)
        if all(self.cache.is_updated.values()):
            self.cache.show()
        nodes = Padded.of(trees, cursor.lengths, cursor.width, self.device).to(self.device)
        with self._positions.at(nodes.ids, nodes.positions, nodes.placed(cursor.view)):
            out = self.forward({"input_ids": nodes.ids}, self.mask(nodes, cursor.view), nodes.positions, taps)
        hidden = {
            layer: [h[: len(t)] for h, t in zip(out.decoder_hidden_states[layer], trees, strict=True)]
            for layer in taps.hidden
        }
        return Scores(out.logits, hidden, [0] * len(trees))

    def forward(self, inputs: dict[str, Any], mask: Any, positions: Tensor, taps: Taps) -> Any:
        cursor, cache = self.cache.cursor, self.cache
        rows = slice(cursor.first, cursor.last)
        given: dict[str, Any] = dict(
            encoder_outputs=BaseModelOutput(last_hidden_state=cache.states[rows]),
            decoder_input_ids=inputs["input_ids"], decoder_attention_mask=mask, past_key_values=cache,
            use_cache=True, output_hidden_states=bool(taps.hidden), return_dict=True,
        )  # fmt: skip
        if self._hears:
            given["attention_mask"] = cache.heard[rows]
        if self._linears is None:
            return self.model(**given)
        with self._linears.compiled():
            return self.model(**given)


class Seq2SeqTarget(DecoderTarget):
    """An encoder-decoder that scores trees with its decoder. See `DecoderTarget`."""

    family = "encoder-decoder"

    def _runner(self, runtime: str) -> tuple[Any, str | None]:
        self._encoder: CompiledEncoderPass | None = None
        if runtime == "stock" or self.device.type != "cpu":
            return Seq2SeqPass(self.model, compiled=False), None
        with suppress(NotCompilable, Refused):
            self._encoder = self._trusted(CompiledEncoderPass(self.model))
        try:
            return CompiledSeq2SeqPass(self.model), None
        except NotCompilable as why:
            return self._own_forward(), str(why)

    @torch.no_grad()
    def _trusted(self, encoder: CompiledEncoderPass) -> CompiledEncoderPass | None:
        """The compiled pass, if it says what the model's own encoder does, padding on either side."""
        known = len(self.model.get_encoder().get_input_embeddings().weight)
        ids = torch.randint(1, known, (3, 9), generator=torch.Generator().manual_seed(0))
        ids[ids == self.model.config.pad_token_id] -= 1
        heard = torch.ones_like(ids)
        heard[1, 6:], heard[2, :2] = 0, 0
        ids = ids.masked_fill(heard == 0, self.model.config.pad_token_id or 0)
        expected = self.model.get_encoder()(input_ids=ids, attention_mask=heard).last_hidden_state.float()
        error = (encoder.states(ids, heard).float() - expected)[heard.bool()].abs().max() / expected.std()
        return encoder if error < (1e-3 if self.dtype == torch.float32 else 0.25) else None

    def score(self, trees: Sequence[DraftTree]) -> Scores:
        if any(tree.embeds for tree in trees):
            raise Refused("probes with embeddings are for decoder language models: draft for this model with another")
        return super().score(trees)

    def _long(self) -> int | None:
        return None  # what a decoder begins with is short

    def _own_forward(self) -> Seq2SeqPass:
        return Seq2SeqPass(self.model, compiled=True)

    def encoded(self, inputs: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` with what the encoder says to the sources, where a compiled pass can say it; states
        given in a tuple as encoders give them."""
        if isinstance(encoded := given.get("encoder_outputs"), tuple | list):
            return {**given, "encoder_outputs": BaseModelOutput(last_hidden_state=states_of(encoded))}
        ids = given.get("input_ids") if inputs is None else inputs
        heard = given.get("attention_mask")
        if (
            self._encoder is None
            or ids is None
            or torch.is_autocast_enabled(self.device.type)
            or not OWN.isdisjoint(name for name, v in given.items() if v is not None)
        ):
            return given
        if heard is None:
            if (ids == self.model.config.pad_token_id).any():
                return given  # generate makes a mask, and may tell that it did
            heard = torch.ones_like(ids)
        heard = (heard != 0).long()
        try:
            states = self._encoder.states(ids, heard)
        except (NotCompilable, IndexError):
            return given
        return {**given, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}

    @torch.no_grad()
    def ready(self, prompts: Sequence[Prompt]) -> bool:
        if any(len(prompt) > 1 for prompt in prompts):
            return False
        self.runner.hear(stacked(prompts, "states"), stacked(prompts, "heard"))  # type: ignore[union-attr]
        assert self.cache is not None
        self.cache.lengths.extend([0] * len(prompts))
        return True

    def _said(self, ids: Tensor, heard: Tensor) -> Tensor:
        """What the encoder says to the sources, (rows, length, H)."""
        if self._encoder is not None:
            with suppress(NotCompilable):  # it was changed since
                return self._encoder.states(ids, heard)
        return self.model.get_encoder()(input_ids=ids, attention_mask=heard, return_dict=True).last_hidden_state

    @property
    def one_vocabulary(self) -> bool:
        read, said = (
            len(half.get_input_embeddings().weight) for half in (self.model.get_encoder(), self.model.get_decoder())
        )
        return read == said and getattr(self.model.config, "share_encoder_decoder_embeddings", True)

    @property
    def context(self) -> int | None:
        return positions_of(self.model)

    @property
    def hard_limit(self) -> int | None:
        return positions_of(self.model)

    @property
    def longest_source(self) -> int | None:
        return table_of(self.model.get_encoder())

    @torch.no_grad()
    def prompts(self, rows: Sequence[Row], width: int) -> list[Prompt]:
        ids = torch.full((len(rows), width), self.model.config.pad_token_id or 0, device=self.device)
        heard = torch.zeros_like(ids)
        for b, row in enumerate(rows):
            ids[b, : len(row.source)] = torch.tensor(row.source, device=self.device)
            heard[b, : len(row.source)] = 1
        states = self._said(ids, heard)
        begun = super().prompts(rows, width)
        return [replace(p, states=s, heard=h) for p, s, h in zip(begun, states, heard, strict=True)]

    def prompt(self, ids: Tensor) -> Prompt:
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(SOURCE, self.config.hidden_size, generator=generator).to(self.device, self.dtype)
        return Prompt(ids, states=states, heard=torch.ones(SOURCE, dtype=torch.long, device=self.device))

    def _allocated(self, rows: int, capacity: int) -> Any:
        layers = layers_of(self.model.get_decoder())
        check_room(self.config, layers, rows, capacity, self.dtype, self.device)
        return PairCache(layers, rows, capacity)


def states_of(encoded: Any) -> Any:
    """The states of what stands for an encoder's output: that itself, or a tuple or list that begins with them."""
    if isinstance(encoded, tuple | list):
        return next(iter(encoded), None)
    return getattr(encoded, "last_hidden_state", None)


def positions_of(model: PreTrainedModel) -> int | None:
    """Positions that the decoder has a table for; None where it counts distances, or grows the table."""
    return table_of(model.get_decoder())


def table_of(stack: Any) -> int | None:
    """The same of either stack."""
    table = getattr(stack, "embed_positions", None)
    if not isinstance(table, torch.nn.Embedding):
        return None
    return table.num_embeddings - getattr(table, "offset", 0)
