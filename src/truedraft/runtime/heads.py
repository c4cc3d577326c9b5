"""Passes of learned heads over a cache of rows: compiled, or in torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from truedraft.caches.rows import RowCache, RowLayer
from truedraft.runtime.compiled import CompiledPass, Nodes
from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.linears import Linears
from truedraft.runtime.program import Program
from truedraft.runtime.weights import NotCompilable


class HeadPass(Protocol):
    """Computes the passes of one head over the slots of the cache that is attached."""

    name: str

    def attach(self, cache: RowCache | None) -> None:
        """Set the cache of the following passes; None detaches it."""

    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        """States (nodes, H), and logits (len(gather), draft vocabulary) of some nodes.

        Args:
            nodes: without token ids.
            embeds, features: (nodes, H) each; see `drafters.heads._head.Head`.
        """


class CompiledHeadPass(CompiledPass):
    """The compiled pass of a head. See `HeadPass`.

    Raises:
        NotCompilable: there is no compiled pass here, or none for this head.
    """

    def _compiled(self) -> Program:
        head: Any = self.model
        if head.dtype not in (torch.float32, torch.bfloat16) or next(head.parameters()).device.type != "cpu":
            raise NotCompilable("it is not fp32 or bf16 on the CPU")
        self._made_of = self._fingerprint()
        program = Program(head.dtype == torch.bfloat16, ["full_attention"] * len(head.blocks))
        program.rotary = head.rotary
        head.compile(program)
        return program

    def _fingerprint(self) -> list[list[object]]:
        head: Any = self.model
        return [fingerprint(part) for part in (head, head.get_input_embeddings(), head.get_output_embeddings())]

    def attach(self, cache: RowCache | None) -> None:
        if cache is not None and self._fingerprint() != self._made_of:
            self._compile()
        super().attach(cache)

    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._reserve(len(nodes))
        given = self._storage[list(self.program.widths).index("features")]
        given[: len(nodes), : features.shape[1]] = features
        fed_back = self.program.fed_back
        logits, states = self(nodes, gather, embeds, (fed_back,))
        return states[fed_back], logits


class TorchHeadPass:
    """The passes of a head in torch, rows padded to the widest. See `HeadPass`."""

    name = "torch"

    def __init__(self, head: Any):
        self.head = head
        self._linears = Linears(head)

    def attach(self, cache: RowCache | None) -> None:
        self.cache = cache
        if cache is None:
            return
        self._linears.refresh()
        config, device = self.head.config, next(self.head.parameters()).device
        for layer in cache.layers:
            if not layer.is_initialized:
                layer.allocate(config.num_key_value_heads, config.head_dim, self.head.dtype, device)

    @torch.no_grad()
    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        assert self.cache is not None
        device, padding = embeds.device, self.cache.cursor.capacity - 1
        index, slots = _rows_of(nodes)
        at = index.clamp_min(0)
        real = index >= 0
        place = torch.tensor(nodes.place)[at].where(real, padding).to(device)
        position = torch.tensor(nodes.position)[at].where(real, 0).to(device)
        mask = _visible(nodes, index)[:, None].to(device)
        rows = torch.tensor(slots, device=device)
        attends = [partial(attended, layer, rows, place, mask) for layer in self.cache.layers]
        given = [part[at.to(device)].to(self.head.dtype) for part in (embeds, features)]
        with self._linears.compiled():
            states = self.head(*given, self.head.rotary(given[0], position), attends)[real.to(device)]
            return states, self.head.logits(states[list(gather)])


def _rows_of(nodes: Nodes) -> tuple[Tensor, list[int]]:
    """(rows, width) indices of the nodes of each slot, -1 as padding, and the slots."""
    found: dict[int, list[int]] = {}
    for node, slot in enumerate(nodes.slot):
        found.setdefault(slot, []).append(node)
    width = max(map(len, found.values()))
    return torch.tensor([row + [-1] * (width - len(row)) for row in found.values()]), list(found)


def _visible(nodes: Nodes, index: Tensor) -> Tensor:
    """(rows, width, places) bool: what each node attends to; padding attends to the first place."""
    base = torch.tensor(nodes.base)[index.clamp_min(0)].where(index >= 0, 1)
    extent = max([*nodes.place, *nodes.base]) + 1
    seen = torch.arange(extent) < base[..., None]
    at = {node: place for place, node in enumerate(index.flatten().tolist())}
    flat = seen.flatten(0, 1)
    for node in range(len(nodes)):
        if extras := nodes.extra[nodes.extra_from[node] : nodes.extra_from[node + 1]]:
            flat[at[node], extras] = True
    return seen


def attended(
    layer: RowLayer, rows: Tensor, place: Tensor, mask: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Write keys and values at their places, and attend to the visible ones; see `_layers.Attend`."""
    for stored, new in ((layer.keys, key), (layer.values, value)):
        stored[rows[:, None], :, place] = new.transpose(1, 2).to(stored.dtype)
    extent = mask.shape[-1]
    keys, values = layer.keys[rows, :, :extent], layer.values[rows, :, :extent]
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def head_pass(head: Any) -> HeadPass:
    """The compiled pass of a head where there is one, else that in torch."""
    try:
        return CompiledHeadPass(head)
    except NotCompilable:
        return TorchHeadPass(head)
