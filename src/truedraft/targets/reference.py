"""The reference: logits of `model.generate` for single rows, the prompt at once and then token by token."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from truedraft.targets.memory import check_room
from truedraft.tree import Row


class Reference:
    """The logits of `model.generate` for single rows, by the model's own forward over a cache of its own.

    A row is read only when its logits are requested; other rows cost nothing.

    Args:
        config: of the language model.
        layers: number of layers with keys and values.
        rows: number of rows of the call.
        capacity: most positions of a row.

    Raises:
        NoRoom: a second cache does not fit in memory beside the target's.
    """

    def __init__(self, model: Any, config: PreTrainedConfig, layers: int, rows: int, capacity: int):
        self.model = model
        self.config = config
        self.device = model.get_input_embeddings().weight.device
        check_room(config, layers, 2 * rows, capacity, model.dtype, self.device)
        parameters = inspect.signature(self.model.forward).parameters
        cut = "logits_to_keep" in parameters
        self._cache = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._last: dict[str, Any] = {"logits_to_keep": 1} if cut else {}
        self._read: dict[int, tuple[int, Cache, Tensor]] = {}  # row -> tokens read, their KV, logits of the last

    @torch.no_grad()
    def __call__(self, row: Row) -> Tensor:
        """(V,) logits of the row's next token."""
        if row.index not in self._read:
            self._read[row.index] = self._prefilled(row)
        length, cache, logits = self._read[row.index]
        for token in row.tokens[length:]:
            ids = torch.tensor([[token]], device=self.device)
            logits = self.model(input_ids=ids, **{self._cache: cache}, use_cache=True).logits[0, -1]
        self._read[row.index] = len(row.tokens), cache, logits
        return logits

    def _prefilled(self, row: Row) -> tuple[int, Cache, Tensor]:
        cache = DynamicCache(config=self.config) if self.model._supports_default_dynamic_cache() else None
        prompt = row.given
        if prompt is not None and prompt.embeds is not None:
            given = {"inputs_embeds": prompt.embeds[None]}
        else:
            given = {"input_ids": torch.tensor([row.tokens[: row.prompt]], device=self.device)}
        out = self.model(**given, **{self._cache: cache}, use_cache=True, **self._last)
        return row.prompt, out[self._cache], out.logits[0, -1]
