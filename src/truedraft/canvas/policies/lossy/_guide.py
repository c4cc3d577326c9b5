"""Policies with a guide: a small causal model of the same tokenizer, which reads what a diffusion model proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from truedraft.canvas._base import CanvasRow
from truedraft.canvas.layout import Layout
from truedraft.canvas.policies.lossy._base import LossyPolicy
from truedraft.card import method_name, shown
from truedraft.errors import Refused
from truedraft.loading import load


@dataclass
class Read:
    """What a guide has read of a row: tokens, with their keys and values."""

    tokens: list[int] = field(default_factory=list)
    cache: DynamicCache = field(default_factory=DynamicCache)


class Guided(LossyPolicy):
    """A policy with a guide.

    The guide has no mask token: it reads texts whose masks are filled by proposals. It makes passes of its own, one row
    at a time, which reports do not count.

    model: the guide, a model or its name.
    """

    model: Any

    def bind(self, vocabulary: int, layout: Layout, tokenizer: Any) -> None:
        guide, words = self._loaded()
        differ = set(range(vocabulary)) ^ set(range(guide.config.get_text_config(decoder=True).vocab_size))
        if words is not None and tokenizer is not None:
            pairs = words.get_vocab().items() ^ tokenizer.get_vocab().items()
            differ = {token for _, token in pairs}
        if not differ <= {layout.mask}:
            raise Refused(
                f"{self._name}:model={shown(self.model)}: its vocabulary is not the model's: give a guide of the same "
                "tokenizer, by its name where only the padding differs, and accelerate() the model's tokenizer"
            )
        self.guide = guide

    @property
    def _name(self) -> str:
        return f"lossy/{method_name(self)}"

    def _loaded(self) -> tuple[Any, Any]:
        if isinstance(self.model, str | PathLike):
            return load(str(self.model), argument="the guide")
        if not isinstance(self.model, PreTrainedModel):
            raise Refused(
                f"{self._name}:model={shown(self.model)}: give the guide, a causal model of the same tokenizer, or its "
                "name"
            )
        return self.model, None

    @torch.no_grad()
    def scores(self, row: CanvasRow, text: Sequence[int], first: int, size: int) -> Tensor:
        """(len(text) - first, size) log-probabilities under the guide of what stands at each position from `first` on,
        given the text before it; -inf for tokens that it does not have."""
        read: Read = row.memory.setdefault(id(self.guide), Read())
        own = self.guide.config.get_text_config(decoder=True).vocab_size
        tokens = [token if token < own else 0 for token in text[:-1]]
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(read.tokens, tokens, strict=False))
        same = min(len(list(pairs)), first - 1)
        if same < len(read.tokens):
            read.cache.crop(same - len(read.tokens))
        ids = torch.tensor([tokens[same:]], device=self.guide.device)
        logits = self.guide(ids, past_key_values=read.cache, use_cache=True).logits[0, first - 1 - same :]
        read.tokens = tokens
        found = torch.log_softmax(logits[:, :size].float(), -1)
        return torch.nn.functional.pad(found, (0, size - found.shape[-1]), value=-torch.inf)
