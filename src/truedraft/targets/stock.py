"""A pass through the model's own forward: padded to the widest tree, with a mask and positions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.runtime.linears import Linears
from truedraft.runtime.weights import Unsuited
from truedraft.targets.padded import Padded
from truedraft.tree import DraftTree, Prompt, Scores, Taps


class StockPass:
    """The forward of a `transformers` model, called as it is.

    window: how many positions back its sliding layers see, or None.
    """

    name = "transformers forward"
    cold = False

    def __init__(self, model: PreTrainedModel, layer_types: Sequence[str], window: int | None):
        self.model, self.layer_types, self.window = model, layer_types, window
        self._cut_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    def attach(self, cache: RowCache | None) -> None:
        """The cache of the passes that follow; None lets go of it."""
        self.cache: RowCache = cache  # type: ignore[assignment]

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        """Read the prompts of new rows; neighbours of equal length share a call."""
        cursor = self.cache.cursor
        logits: list[Tensor] = []
        hidden: dict[int, list[Tensor]] = {layer: [] for layer in taps.hidden}
        for length, group in groupby(prompts, len):
            batch = list(group)
            first = len(cursor.lengths)
            cursor.lengths += [0] * len(batch)
            cursor.begin(first, first + len(batch), length, self.device)
            positions = torch.arange(length, device=self.device)[None].expand(len(batch), -1)
            inputs: dict[str, Any]
            if batch[0].embeds is not None:
                inputs = {"inputs_embeds": torch.stack([p.embeds for p in batch])}  # type: ignore[misc]
            else:
                inputs = {"input_ids": torch.stack([p.ids for p in batch])}  # type: ignore[misc]
            if self._cut_logits:
                inputs["logits_to_keep"] = 1
            out = self.forward(inputs, None, positions, taps)
            logits += list(out.logits[:, -1:])
            for layer, kept in hidden.items():
                kept += list(out.hidden_states[layer])
            cursor.lengths[first:] = [length - 1] * len(batch)  # the root is committed with its path
        return Scores(torch.stack(logits), hidden, [len(p) - 1 for p in prompts])

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree], taps: Taps) -> Scores:
        """The logits at every node of one tree per slot in use."""
        cursor = self.cache.cursor
        cursor.begin(0, len(trees), max(map(len, trees)), self.device)
        nodes = Padded.of(trees, cursor.lengths, cursor.width, self.device).to(self.device)
        lone = nodes.ids.numel() == 1 and (self.window is None or cursor.view <= self.window)
        mask = None if lone else self.mask(nodes, cursor.view)
        out = self.forward({"input_ids": nodes.ids}, mask, nodes.positions, taps)
        hidden = {
            layer: [h[: len(t)] for h, t in zip(out.hidden_states[layer], trees, strict=True)] for layer in taps.hidden
        }
        return Scores(out.logits, hidden, [0] * len(trees))

    def forward(self, inputs: dict[str, Any], mask: Any, positions: Tensor, taps: Taps) -> Any:
        """The model's own output, over the cache as its cursor stands."""
        return self.model(
            **inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(taps.hidden),
            return_dict=True,
        )

    def mask(self, nodes: Padded, view: int) -> Any:
        """What each node sees of the first `view` places, (rows, 1, width, view), as the model takes it."""
        seen = nodes.seen(view)
        if self.window is None:
            return self._dressed(seen)
        near = seen if view <= self.window else seen & nodes.near(view, self.window)
        if "full_attention" in self.layer_types:
            return {"full_attention": self._dressed(seen), "sliding_attention": self._dressed(near)}
        return self._dressed(near)

    def _dressed(self, seen: Tensor) -> Tensor:
        seen = seen[:, None]
        if self.model.config.get_text_config(decoder=True)._attn_implementation != "eager":
            return seen
        return torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device).masked_fill_(
            ~seen, torch.finfo(self.model.dtype).min
        )


class LinearsPass(StockPass):
    """The model's own forward with its linear layers by compiled code.

    Raises:
        Unsuited: there is no compiled code here, or no layer that it would compute.
    """

    name = "transformers forward with compiled linear layers"

    def __init__(self, model: PreTrainedModel, layer_types: Sequence[str], window: int | None):
        super().__init__(model, layer_types, window)
        self._linears = Linears(model)
        if not self._linears:
            raise Unsuited("there are no linear layers for compiled code")

    def attach(self, cache: RowCache | None) -> None:
        super().attach(cache)
        if cache is not None:
            self._linears.refresh()

    def forward(self, inputs: dict[str, Any], mask: Any, positions: Tensor, taps: Taps) -> Any:
        with self._linears.compiled():
            return super().forward(inputs, mask, positions, taps)
