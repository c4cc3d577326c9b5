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
from truedraft.tree import DraftTree, Prompt, Scores, Taps


class StockPass:
    """The forward of a `transformers` model, called as it is.

    window: how many positions back its sliding layers see, or None.
    """

    name = "transformers forward"

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
            out = self._forward(inputs, None, positions, taps)
            logits += list(out.logits[:, -1:])
            for layer, kept in hidden.items():
                kept += list(out.hidden_states[layer])
            cursor.lengths[first:] = [length - 1] * len(batch)  # the root is committed with its path
        return Scores(torch.stack(logits), hidden, [len(p) - 1 for p in prompts])

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree], taps: Taps) -> Scores:
        """The logits at every node of one tree per slot in use."""
        cursor = self.cache.cursor
        lengths = cursor.lengths
        width = max(map(len, trees))
        cursor.begin(0, len(trees), width, self.device)
        ids = torch.tensor([t.tokens + (0,) * (width - len(t)) for t in trees], device=self.device)
        positions = torch.tensor(
            [[n + d for d in t.shape.depth] + [n] * (width - len(t)) for n, t in zip(lengths, trees, strict=True)],
            device=self.device,
        )
        lone = width == 1 and len(trees) == 1 and (self.window is None or cursor.view <= self.window)
        mask = None if lone else self._mask(trees, positions, width)
        out = self._forward({"input_ids": ids}, mask, positions, taps)
        hidden = {
            layer: [h[: len(t)] for h, t in zip(out.hidden_states[layer], trees, strict=True)] for layer in taps.hidden
        }
        return Scores(out.logits, hidden, [0] * len(trees))

    def _forward(self, inputs: dict[str, Any], mask: Any, positions: Tensor, taps: Taps) -> Any:
        return self.model(
            **inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(taps.hidden),
            return_dict=True,
        )

    def _mask(self, trees: Sequence[DraftTree], positions: Tensor, width: int) -> Any:
        """What each node sees: its row's committed positions and its ancestors; (rows, 1, width, view)."""
        cursor = self.cache.cursor
        seen = torch.zeros(len(trees), 1, width, cursor.view, dtype=torch.bool)
        for b, (n, tree) in enumerate(zip(cursor.lengths, trees, strict=True)):
            nodes = len(tree)
            seen[b, 0, :, :n] = True
            seen[b, 0, :nodes, n : n + nodes] = tree.shape.mask
            if nodes < width:
                # padding sees itself, so that its softmax has something to sum over
                seen[b, 0, range(nodes, width), range(n + nodes, n + width)] = True
        seen = seen.to(self.device)
        if self.window is None or cursor.view <= self.window:
            near = seen
        else:
            near = seen & (positions[:, None, :, None] - self._places(positions, width) < self.window)
        if self.window is None:
            return self._dressed(seen)
        if "full_attention" in self.layer_types:
            return {"full_attention": self._dressed(seen), "sliding_attention": self._dressed(near)}
        return self._dressed(near)

    def _places(self, positions: Tensor, width: int) -> Tensor:
        """The position of every entry that a row may read: its place, or behind it a node's; (rows, 1, 1, view)."""
        cursor = self.cache.cursor
        places = torch.arange(cursor.view, device=self.device).repeat(len(positions), 1)
        for b, n in enumerate(cursor.lengths):
            places[b, n : n + width] = positions[b]
        return places[:, None, None, :]

    def _dressed(self, seen: Tensor) -> Tensor:
        if self.model.config._attn_implementation != "eager":
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

    def _forward(self, inputs: dict[str, Any], mask: Any, positions: Tensor, taps: Taps) -> Any:
        with self._linears:
            return super()._forward(inputs, mask, positions, taps)
