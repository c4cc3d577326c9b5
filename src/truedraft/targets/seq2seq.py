"""Encoder-decoders as targets: `generate` runs the encoder, once; the decoder scores trees as a decoder model does.

Keys and values of a row's source are computed by the row's first pass and cached until it is released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation.utils import GenerateEncoderDecoderOutput

from truedraft.caches.seq2seq import Seq2SeqCache
from truedraft.errors import Refused
from truedraft.runtime._base import Runner
from truedraft.runtime.modules import source_width
from truedraft.runtime.panels import panels_of
from truedraft.runtime.positions import table_size
from truedraft.runtime.seq2seq import CompiledEncoderPass, CompiledSeq2SeqPass, EncoderOutput, padded_sources
from truedraft.runtime.seq2seq_forward import Seq2SeqLinearsPass, Seq2SeqPass
from truedraft.runtime.seq2seq_programs import layer_types_of
from truedraft.runtime.weights import NotCompilable
from truedraft.targets.decoder import DecoderTarget
from truedraft.targets.inputs import check_sources, source_prompts, states_of
from truedraft.targets.kinds import Family
from truedraft.targets.memory import check_room, free_memory
from truedraft.tree import DraftTree, Prompt, Row, Scores
from truedraft.views._base import View

OWN = {"encoder_outputs", "inputs_embeds", "input_features", "output_attentions", "output_hidden_states"}
SOURCE = 32  # positions of the source with which passes are timed


class Seq2SeqTarget(DecoderTarget):
    """An encoder-decoder that scores trees with its decoder. See `DecoderTarget`."""

    runner: CompiledSeq2SeqPass | Seq2SeqPass
    family: ClassVar[Family] = "encoder-decoder"
    reads_sources = True
    output_class = GenerateEncoderDecoderOutput
    _cache_class = Seq2SeqCache
    _forward_class = Seq2SeqPass
    _linears_class = Seq2SeqLinearsPass

    def _layer_types(self) -> list[str]:
        return layer_types_of(self.model.get_decoder())

    def _runner(self, runtime: str) -> tuple[Runner, str | None]:
        self._encoder: CompiledEncoderPass | None = None
        if runtime != "stock" and self.device.type == "cpu":
            copied = panels_of(self.model, free_memory(self.device)) if runtime == "auto" else None
            with suppress(NotCompilable, Refused):
                self._encoder = self._checked(CompiledEncoderPass(self.model, copied))
        return super()._runner(runtime)

    def _fast(self) -> Runner:
        return CompiledSeq2SeqPass(self.model, self._copied) if self.device.type == "cpu" else self._stock()

    @torch.no_grad()
    def _checked(self, encoder: CompiledEncoderPass) -> CompiledEncoderPass | None:
        """The compiled encoder pass, if it reproduces the model's encoder with padding on either side; else None."""
        vocab_size = len(self.model.get_encoder().get_input_embeddings().weight)
        ids = torch.randint(1, vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
        ids[ids == self.model.config.pad_token_id] -= 1
        source_mask = torch.ones_like(ids)
        source_mask[1, 6:], source_mask[2, :2] = 0, 0
        ids = ids.masked_fill(source_mask == 0, self.model.config.pad_token_id or 0)
        expected = self.model.get_encoder()(input_ids=ids, attention_mask=source_mask).last_hidden_state.float()
        error = (encoder.states(ids, source_mask).float() - expected)[source_mask.bool()].abs().max() / expected.std()
        return encoder if error < (1e-3 if self.dtype == torch.float32 else 0.25) else None

    def score(self, trees: Sequence[DraftTree], view: View | None = None, slots: Sequence[int] | None = None) -> Scores:
        if any(tree.embeds for tree in trees):
            raise Refused("probes with embeddings are for decoder language models: use another drafter for this model")
        return super().score(trees, view, slots)

    def _long(self) -> int | None:
        return None  # decoder prompts are short

    @property
    def granularity(self) -> int | None:
        return None  # decoder prompts are short

    def check_inputs(self, inputs: Any, given: Mapping[str, Any]) -> None:
        check_sources(self.model, inputs, given)

    def encoded(self, inputs: Tensor | None, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` with the encoder's output, where a compiled pass computes it or it was given as a
        tuple of states."""
        if isinstance(encoded := given.get("encoder_outputs"), tuple | list):
            return {**given, "encoder_outputs": EncoderOutput(last_hidden_state=states_of(encoded))}
        ids = given.get("input_ids") if inputs is None else inputs
        source_mask = given.get("attention_mask")
        if (
            self._encoder is None
            or ids is None
            or torch.is_autocast_enabled(self.device.type)
            or not OWN.isdisjoint(name for name, v in given.items() if v is not None)
        ):
            return given
        if source_mask is None:
            if (ids == self.model.config.pad_token_id).any():
                return given  # generate makes a mask, and may warn of it
            source_mask = torch.ones_like(ids)
        source_mask = (source_mask != 0).long()
        try:
            states = self._encoder.states(ids, source_mask)
        except (NotCompilable, IndexError):
            return given
        return {**given, "encoder_outputs": EncoderOutput(last_hidden_state=states)}

    def prompts_of(self, input_ids: Tensor, given: Mapping[str, Any], sources: Tensor | None) -> list[Prompt]:
        return source_prompts(input_ids, given, sources)

    def check_room(self, prompts: Sequence[Prompt]) -> None:
        cache: Any = self.cache
        width = max(len(prompt.states) for prompt in prompts)  # type: ignore[arg-type]
        if width > cache.width:
            layers, slots = len(cache.sources), cache.cursor.slots
            remedy = "shorten the source, or give fewer at once"
            check_room(self.config, layers, slots, width, self.dtype, self.device, remedy)

    @torch.no_grad()
    def admit(self, prompts: Sequence[Prompt]) -> Scores | None:
        """Rows whose decoder prompt is a single token need no pass: it is the root of their first tree."""
        if any(len(prompt) > 1 for prompt in prompts):
            return self.prefill(prompts)
        self.rewind()
        assert self.cache is not None
        self.runner.read_source(*padded_sources(prompts))
        self.cache.lengths.extend([0] * len(prompts))
        if self.on_read is not None:
            total = sum(len(prompt.states) for prompt in prompts if prompt.states is not None)
            self.on_read(total, total)
        return None

    def _encoded(self, ids: Tensor, source_mask: Tensor) -> Tensor:
        """The encoder's output for sources, (rows, length, H)."""
        if self._encoder is not None:
            with suppress(NotCompilable):  # the encoder was changed since
                return self._encoder.states(ids, source_mask)
        return self.model.get_encoder()(input_ids=ids, attention_mask=source_mask, return_dict=True).last_hidden_state

    @property
    def shared_vocabulary(self) -> bool:
        if self.model.main_input_name != "input_ids":
            return False  # sources are sounds
        encoder, decoder = (
            len(half.get_input_embeddings().weight) for half in (self.model.get_encoder(), self.model.get_decoder())
        )
        return encoder == decoder and getattr(self.model.config, "share_encoder_decoder_embeddings", True)

    @property
    def embedding_width(self) -> int | None:
        return None

    @property
    def context(self) -> int | None:
        return table_size(self.model.get_decoder())

    @property
    def hard_limit(self) -> int | None:
        return table_size(self.model.get_decoder())

    @property
    def longest_source(self) -> int | None:
        return table_size(self.model.get_encoder())

    @torch.no_grad()
    def prompts(self, rows: Sequence[Row], texts: Sequence[Sequence[int]], width: int) -> list[Prompt]:
        ids = torch.full((len(rows), width), self.model.config.pad_token_id or 0, device=self.device)
        source_mask = torch.zeros_like(ids)
        for b, row in enumerate(rows):
            ids[b, : len(row.source)] = torch.tensor(row.source, device=self.device)
            source_mask[b, : len(row.source)] = 1
        states = self._encoded(ids, source_mask)
        given = zip(super().prompts(rows, texts, width), states, source_mask, strict=True)
        return [replace(prompt, states=state, source_mask=mask) for prompt, state, mask in given]

    def prompt(self, ids: Tensor) -> Prompt:
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(SOURCE, source_width(self.model), generator=generator).to(self.device, self.dtype)
        return Prompt(ids, states=states, source_mask=torch.ones(SOURCE, dtype=torch.long, device=self.device))
