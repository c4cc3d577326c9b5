"""Any `transformers` decoder language model as a target: trees and rows of different lengths on the stock model.

The model is called as it is, with a cache whose rows have their own lengths (`caches/rows.py`), explicit positions
and an explicit mask. Layers with full attention are hosted, and sliding windows too: their keys are kept and the
mask does the sliding. Whatever keeps a running state is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from truedraft.caches.rows import RowCache
from truedraft.errors import Refused
from truedraft.targets.quirks import HOSTED_LAYERS, REFUSALS, learned_positions
from truedraft.tree import DraftTree, Scores, Taps


@dataclass(frozen=True)
class Prompt:
    """What a row begins with: token ids, or embeddings (length, H) in their place."""

    ids: Tensor | None = None
    embeds: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.ids is not None else len(self.embeds)  # type: ignore[arg-type]


class DecoderTarget:
    """A decoder language model that scores trees.

    Args:
        model: a causal language model of `transformers`, in eval mode.

    Raises:
        Refused: the model cannot be hosted exactly; the message says why.
    """

    family = "decoder"

    def __init__(self, model: PreTrainedModel):
        check_hosted(model)
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.taps = Taps()
        self.cache: RowCache | None = None
        self.layer_types = get_layer_types_and_kwargs(self.config)[0]
        self.window = getattr(self.config, "sliding_window", None) if "sliding_attention" in self.layer_types else None
        self._cut_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocabulary: int = self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def context(self) -> int | None:
        """Positions that the model was made for."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def hard_limit(self) -> int | None:
        """Positions past which the model itself fails; None where it does not."""
        return learned_positions(self.config)

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` positions each.

        Raises:
            Refused: the cache would not fit in the memory that is free; nothing was computed yet.
        """
        c = self.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        need = 2 * len(self.layer_types) * rows * capacity * heads * size * self.dtype.itemsize
        free = (
            torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else psutil.virtual_memory().available
        )
        if need > free:
            raise Refused(
                f"the KV cache of {rows} rows x {capacity} positions needs {need:,} bytes, {free:,} are free: "
                "lower max_new_tokens or the batch size"
            )
        self.cache = RowCache(len(self.layer_types), rows, capacity)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Prompt]) -> Scores:
        """Read the prompts of new rows, each taking the next free slot; the scores are those of their last tokens.

        Neighbours of equal length share a call.
        """
        assert self.cache is not None
        cursor = self.cache.cursor
        logits: list[Tensor] = []
        hidden: dict[int, list[Tensor]] = {layer: [] for layer in self.taps.hidden}
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
            out = self._forward(inputs, None, positions)
            logits += list(out.logits[:, -1:])
            for layer, kept in hidden.items():
                kept += list(out.hidden_states[layer])
            cursor.lengths[first:] = [length - 1] * len(batch)  # the root is committed with its path
        return Scores(torch.stack(logits), hidden, [len(p) - 1 for p in prompts])

    @torch.no_grad()
    def score(self, trees: Sequence[DraftTree]) -> Scores:
        """One pass: the logits at every node of one tree per slot in use."""
        assert self.cache is not None
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
        out = self._forward({"input_ids": ids}, mask, positions)
        hidden = {
            layer: [h[: len(t)] for h, t in zip(out.hidden_states[layer], trees, strict=True)]
            for layer in self.taps.hidden
        }
        return Scores(out.logits, hidden, [0] * len(trees))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Make the KV of each slot's accepted path permanent; the rest of the pass is forgotten."""
        assert self.cache is not None
        for slot, path in enumerate(paths):
            self.cache.commit(slot, path)

    def release(self, slot: int) -> None:
        """Free a slot; the last slot in use moves into it."""
        assert self.cache is not None
        self.cache.release(slot)

    def _forward(self, inputs: dict[str, Any], mask: Any, positions: Tensor) -> Any:
        return self.model(
            **inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=bool(self.taps.hidden),
            return_dict=True,
        )

    def _mask(self, trees: Sequence[DraftTree], positions: Tensor, width: int) -> Any:
        """What each node sees: its row's committed positions and its ancestors; (rows, 1, width, view)."""
        cursor = self.cache.cursor  # type: ignore[union-attr]
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
        cursor = self.cache.cursor  # type: ignore[union-attr]
        places = torch.arange(cursor.view, device=self.device).repeat(len(positions), 1)
        for b, n in enumerate(cursor.lengths):
            places[b, n : n + width] = positions[b]
        return places[:, None, None, :]

    def _dressed(self, seen: Tensor) -> Tensor:
        if self.model.config._attn_implementation != "eager":
            return seen
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(
            ~seen, torch.finfo(self.dtype).min
        )


def check_hosted(model: Any) -> None:
    """Raises Refused, in one sentence, where a model cannot be hosted exactly."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise Refused(
            f"model={name} is not a model of transformers: load one with AutoModelForCausalLM.from_pretrained"
        )
    if not getattr(model, "can_generate", lambda: False)():
        raise Refused(f"{name} is not generative: it has no language-model head; load it with AutoModelForCausalLM")
    if model.config.is_encoder_decoder:
        raise Refused(f"{name} is an encoder-decoder, which is not hosted yet: only decoder language models are")
    if model.training:
        raise Refused(f"{name} is in training mode, where dropout makes the text random: call model.eval() first")
    config = model.config.get_text_config(decoder=True)
    for refusal in REFUSALS:
        if why := refusal(config):
            raise Refused(f"{name} cannot be hosted exactly: it {why}")
    parameters = inspect.signature(model.forward).parameters
    for needed in ("position_ids", "past_key_values", "attention_mask"):
        if needed not in parameters:
            raise Refused(f"{name} cannot be hosted exactly: its forward takes no {needed}, which trees need")
    foreign = set(get_layer_types_and_kwargs(config)[0]) - HOSTED_LAYERS
    if foreign or getattr(model, "_is_stateful", False):
        kinds = ", ".join(sorted(foreign)) or "recurrent state"
        raise Refused(
            f"{name} cannot be hosted exactly: it has {kinds} layers, whose state cannot be rolled back to a path"
        )
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise Refused(
            f"attn_implementation={attention!r} takes no tree mask: load the model with attn_implementation='sdpa'"
        )


@torch.no_grad()
def check_exact(target: DecoderTarget) -> None:
    """Compare a tree pass with plain forwards of its paths, on this model and machine, before it is trusted.

    Raises:
        Refused: the model's own arithmetic does not survive trees (a mask or position that it ignores).
    """
    model, vocabulary = target.model, target.vocabulary
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (9,), generator=generator).tolist()
    prompt, tree = ids[:4], DraftTree((ids[4], *ids[5:9]), (-1, 0, 0, 1, 2))
    target.reserve(2, 16)
    target.prefill(
        [
            Prompt(torch.tensor(prompt + [ids[4]], device=target.device)),
            Prompt(torch.tensor([ids[4]], device=target.device)),
        ]
    )
    scores = target.score([tree, tree]).logits.float()
    target.cache = None
    for row, before in enumerate((prompt, [])):
        for leaf in (3, 4):
            path = tree.path(leaf)
            plain = torch.tensor([before + [tree.tokens[i] for i in path]], device=target.device)
            expected = model(plain, use_cache=False).logits[0, -len(path) :].float()
            spread = expected.std(-1).mean().clamp_min(1e-6)
            error = ((scores[row, list(path)] - expected).abs().max() / spread).item()
            tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.25
            if error > tolerance:
                raise Refused(
                    f"{type(model).__name__} cannot be hosted exactly: a tree pass differs from plain forwards by "
                    f"{error:.2g} standard deviations of the logits (allowed {tolerance}): it ignores mask or positions"
                )
