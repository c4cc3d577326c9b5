"""Policies with a guide: a small causal model of the same tokenizer, which reads what a diffusion model proposes."""

from __future__ import annotations

from collections.abc import Sequence
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
from truedraft.targets.hostable import keeps_states
from truedraft.targets.kinds import reads_sources


class Guided(LossyPolicy):
    """A policy with a guide.

    The guide has no mask token: it reads texts whose masks are filled by proposals. It makes passes of its own, one row
    at a time, which reports do not count.

    model: the guide, a model or its name.
    """

    model: Any

    def bind(self, vocabulary: int, layout: Layout, tokenizer: Any) -> None:
        guide, words = self._loaded()
        if reads_sources(guide.config) or keeps_states(guide.config):
            raise Refused(f"{self._name}:model={shown(self.model)}: give a decoder without recurrent states")
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
        given the text before it; -inf for tokens that it does not have.

        first: the first unknown position; what became known before it since the last call stood in the text of that.
        """
        read: DynamicCache = row.memory.setdefault(id(self.guide), DynamicCache())
        own = self.guide.config.get_text_config(decoder=True).vocab_size
        tokens = [token if token < own else 0 for token in text[:-1]]
        length = read.get_seq_length()
        same = min(length, first - 1)
        read.crop(same - length)
        ids = torch.tensor([tokens[same:]], device=self.guide.device)
        logits = self.guide(ids, past_key_values=read, use_cache=True).logits[0, first - 1 - same :]
        found = torch.log_softmax(logits[:, :size].float(), -1)
        return torch.nn.functional.pad(found, (0, size - found.shape[-1]), value=-torch.inf)
