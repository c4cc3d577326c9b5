"""Scoring canvases under a view: some positions are computed anew, the others are read as they were stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from truedraft.canvas._base import CanvasRow, Draft
from truedraft.canvas.layout import Layout
from truedraft.canvas.passes import CompiledNodes, ForwardNodes
from truedraft.canvas.targets import CanvasTarget, Variant
from truedraft.canvas.views._base import Attention, CanvasView, whole
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.selecting import check_seen


@dataclass(frozen=True, kw_only=True)
class Part(Variant):
    """A row's own canvas, of which a pass computes some positions; `tokens` are those at these.

    positions: in order.
    unknown: the masked ones whose logits are computed; `masked` are those of the span to be filled.
    """

    row: CanvasRow
    positions: Sequence[int]
    unknown: Sequence[int]


class CachedTarget(CanvasTarget):
    """A model that attends to the whole canvas, under a view; one canvas of a row per pass.

    Keys and values of all positions of a row are kept in its slot, each as the latest pass that computed it left them.
    """

    together: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel, layout: Layout, runtime: str, view: CanvasView):
        self.view = view
        super().__init__(model, layout, runtime)

    def _runner(self, runtime: str) -> tuple[CompiledNodes | ForwardNodes, str | None]:
        if not self.view.reads_attention:
            return super()._runner(runtime)
        check_seen(self.model, self.config.num_hidden_layers)
        return ForwardNodes(self.model), f"{self.view.lossy} reads the attention of the model's own forward"

    def reserve(self, rows: int, capacity: int, variants: int) -> None:
        self._reserve(rows, capacity)

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        assert self.cache is not None
        self.cache.lengths.extend([self.cache.cursor.capacity] * len(prompts))
        return [0] * len(prompts)

    def variant(self, row: CanvasRow, draft: Draft) -> Part:
        return self.part(row, self.view.positions(row) if row.step else whole(row))

    def part(self, row: CanvasRow, chosen: Iterable[int]) -> Part:
        """The canvas of a row, of which these positions are computed, and where logits are for the next position those
        before the masked ones."""
        canvas, block, masked = row.reached(frozenset())
        computed = {*chosen}
        unknown = [i for i in sorted(computed) if not canvas.known[i]]
        positions = sorted(computed.union(i - self.layout.shifted for i in unknown))
        tokens = [canvas.tokens[i] for i in positions]
        asked = [i for i in masked if i in computed]
        return Part(0, tokens, block, asked, row=row, positions=positions, unknown=unknown)

    def score(self, rows: Sequence[Sequence[Variant]]) -> list[Tensor]:
        parts: list[Part] = [own for (own,) in rows]  # type: ignore[misc]
        if self.view.reads_attention:
            return [self._observed(slot, part) for slot, part in enumerate(parts)]
        logits = self._computed(dict(enumerate(parts)), [part.masked for part in parts])
        return list(logits.split([len(part.masked) for part in parts]))

    def probe(self, width: int) -> None:
        nodes = Nodes()
        nodes.add_part(0, [0] * width, range(width), width)
        self.runner(nodes, range(width))

    def _observed(self, slot: int, part: Part) -> Tensor:
        with SeenAttention(self.view, part):
            logits = self._computed({slot: part}, [part.unknown])
        self.view.scored(part.row, part.unknown, logits)
        return logits[[part.unknown.index(i) for i in part.masked]]

    def _computed(self, parts: Mapping[int, Part], places: Sequence[Sequence[int]]) -> Tensor:
        """One pass over these slots; logits (sum of places, V) for masked positions of each."""
        nodes, gather = Nodes(), list[int]()
        for (slot, part), asked in zip(parts.items(), places, strict=True):
            node = {position: len(nodes) + i for i, position in enumerate(part.positions)}
            gather += [node[position - self.layout.shifted] for position in asked]
            nodes.add_part(slot, part.tokens, part.positions, len(part.row.canvas))
        return self.runner(nodes, gather)

    def release(self, slot: int) -> None:
        assert self.cache is not None
        self.cache.release(slot)


class SeenAttention(TorchFunctionMode):
    """Within the block, a view sees what each layer of a pass over one row attends with, and says what is read."""

    def __init__(self, view: CanvasView, part: Part):
        super().__init__()
        self.view, self.part, self.layer = view, part, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, key = (*args, *(given[name] for name in ("query", "key") if name in given))[:2]
            shared = query.shape[1] // key.shape[1]
            scale = given.get("scale") or query.shape[-1] ** -0.5
            keys = key[0].repeat_interleave(shared, 0)
            seen = self.view.attend(self.part.row, Attention(self.layer, self.part.positions, query[0], keys, scale))
            if seen is not None:
                given["attn_mask"] = seen[None]
            self.layer += 1
        return func(*args, **given)
