"""Passes of learned heads over a cache of rows: compiled, or in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from truedraft.caches.rows import RowCache, RowLayer
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.fingerprint import fingerprint
from truedraft.runtime.linears import Linears
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.panels import Int8Copies
from truedraft.runtime.program import Program
from truedraft.runtime.weights import Copies, NotCompilable
from truedraft.views._base import Reduction


class HeadPass(Protocol):
    """Computes the passes of one head over the slots of the cache that is attached."""

    name: str

    def attach(self, cache: RowCache | None) -> None:
        """Set the cache of the following passes; None detaches it."""

    def fuse(self, features: Tensor) -> Tensor:
        """(count, layers * H of the target) to (count, H), see `drafters.heads._head.Head.fuse`."""

    def read(self, nodes: Nodes, embeds: Tensor, features: Tensor) -> None:
        """Write the keys and values of nodes, of which nothing else is needed; see `run`."""

    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        """States (nodes, H), and logits (len(gather), draft vocabulary) of some nodes.

        Args:
            nodes: without token ids.
            embeds, features: (nodes, H) each; see `drafters.heads._head.Head`.
        """


class CompiledHeadPass(CompiledPass):
    """The compiled pass of a head. See `HeadPass`.

    Args:
        int8: makes the copies that are read in place of plain weights; None where these are read themselves.

    Raises:
        NotCompilable: there is no compiled pass here, or none for this head.
    """

    def __init__(self, head: Any, int8: Int8Copies | None = None):
        super().__init__(head, int8)
        self._linears = Linears(head, int8)

    def _compiled(self, copied: Copies | None) -> Program:
        head: Any = self.model
        if head.dtype not in (torch.float32, torch.bfloat16) or next(head.parameters()).device.type != "cpu":
            raise NotCompilable("it is not fp32 or bf16 on the CPU")
        self._made_of = self._fingerprint()
        if copied is not None:
            copied.clear()
        return program_of(head, copied)

    def _fingerprint(self) -> list[list[object]]:
        head: Any = self.model
        return [fingerprint(part) for part in (head, head.get_input_embeddings(), head.get_output_embeddings())]

    def attach(self, cache: RowCache | None) -> None:
        if cache is not None:
            if self._fingerprint() != self._made_of:
                self._compile()
            self._linears.refresh()
        super().attach(cache)

    def fuse(self, features: Tensor) -> Tensor:
        with self._linears.compiled():
            head: Any = self.model
            return head.fuse(features)

    def read(self, nodes: Nodes, embeds: Tensor, features: Tensor) -> None:
        self._give(features)
        self(nodes, (), embeds)

    def _give(self, features: Tensor) -> None:
        self._reserve(len(features))
        given = self._storage[list(self.program.widths).index("features")]
        given[: len(features), : features.shape[1]] = features

    def _ops(self, hidden: tuple[int, ...], reduction: Reduction) -> ctypes.Array[Op]:
        """Without hidden states, those up to the keys and values of the last block, its queries left out."""
        if hidden:
            return super()._ops(hidden, reduction)
        key = (), reduction, None
        if key not in self._variants:
            p, queries = self.program, list(self.program.widths).index("q")
            last = max(i for i, op in enumerate(p.ops) if op.kind == OpKind.PREPARE and op.kv_heads)
            block = p.ops_of(len(p.outputs) - 2)
            ops = [op for i, op in enumerate(p.ops[: last + 1]) if i not in block or op.dst != queries]
            self._variants[key] = (Op * len(ops))(*ops)
        return self._variants[key]

    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._give(features)
        fed_back = self.program.fed_back
        logits, states = self(nodes, gather, embeds, (fed_back,))
        return states[fed_back], logits


def program_of(head: Any, copied: Copies | None) -> Program:
    """The operations of a head. copied: see `Program`.

    Raises:
        NotCompilable: there is no compiled pass for it.
    """
    program = Program(head.dtype == torch.bfloat16, ["full_attention"] * len(head.blocks))
    program.rotary, program.copied = head.rotary, copied
    head.compile(program)
    return program


class TorchHeadPass:
    """The passes of a head in torch, rows padded to the widest. See `HeadPass`.

    Args:
        int8: see `CompiledHeadPass`.
    """

    name = "torch"

    def __init__(self, head: Any, int8: Int8Copies | None = None):
        self.head = head
        self._linears = Linears(head, int8)

    def attach(self, cache: RowCache | None) -> None:
        self.cache = cache
        if cache is None:
            return
        self._linears.refresh()
        if not cache.layers[0].is_initialized:
            self.head.allocate(cache)

    @torch.no_grad()
    def fuse(self, features: Tensor) -> Tensor:
        with self._linears.compiled():
            return self.head.fuse(features)

    def read(self, nodes: Nodes, embeds: Tensor, features: Tensor) -> None:
        self.run(nodes, embeds, features, ())

    @torch.no_grad()
    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        placed = self.placed(nodes, embeds.device)
        given = [part[placed.at].to(self.head.dtype) for part in (embeds, features)]
        with self._linears.compiled():
            states = self.head(*given, self.head.rotary(given[0], placed.position), placed.attends)[placed.real]
            return states, self.head.logits(states[list(gather)])

    def placed(self, nodes: Nodes, device: torch.device) -> PlacedNodes:
        """The nodes of a pass, in rows of one width."""
        assert self.cache is not None
        padding = self.cache.cursor.capacity - 1
        index, slots = _rows_of(nodes)
        at = index.clamp_min(0)
        real = index >= 0
        position = torch.tensor(nodes.position)[at].where(real, 0)
        pass_nodes = PassNodes(
            torch.tensor(slots, device=device),
            torch.tensor(nodes.place)[at].where(real, padding).to(device),
            torch.tensor(_preceding(nodes))[at].where(real, padding).to(device),
            (position + 1 - torch.tensor(nodes.base)[at]).where(real, 0).to(device),
            _visible(nodes, index)[:, None].to(device),
        )
        attends = [NodeAttention(layer, pass_nodes) for layer in self.cache.layers]
        return PlacedNodes(slots, at.to(device), real.to(device), position.to(device), attends)


def _rows_of(nodes: Nodes) -> tuple[Tensor, list[int]]:
    """(rows, width) indices of the nodes of each slot, -1 as padding, and the slots."""
    found: dict[int, list[int]] = {}
    for node, slot in enumerate(nodes.slot):
        found.setdefault(slot, []).append(node)
    width = max(map(len, found.values()))
    return torch.tensor([row + [-1] * (width - len(row)) for row in found.values()]), list(found)


def _visible(nodes: Nodes, index: Tensor) -> Tensor:
    """(rows, width, places) positions of what each node attends to, -1 for other places; padding attends to the first
    place."""
    base = torch.tensor(nodes.base)[index.clamp_min(0)].where(index >= 0, 1)
    extent = max([*nodes.place, *nodes.base]) + 1
    every = torch.arange(extent)
    seen = every.where(every < base[..., None], -1)
    at = {node: place for place, node in enumerate(index.flatten().tolist())}
    flat = seen.flatten(0, 1)
    for node in range(len(nodes)):
        some = slice(nodes.extra_from[node], nodes.extra_from[node + 1])
        if extras := nodes.extra[some]:
            flat[at[node], extras] = torch.tensor(nodes.extra_position[some])
    return seen


def _preceding(nodes: Nodes) -> list[int]:
    """The place of the token before each node's: its parent's, or the row's last."""
    spans = zip(nodes.place, nodes.base, nodes.extra_from, nodes.extra_from[1:], strict=False)
    found = []
    for place, base, first, last in spans:
        if first == last:
            found.append(max(place - 1, 0))
        else:
            found.append(nodes.extra[last - 2] if last - first > 1 else base - 1)
    return found


@dataclass(frozen=True)
class PassNodes:
    """The nodes of a pass, (rows, width) each, rows padded to the widest.

    rows: (rows,) their slots. place: where keys and values are written. preceding: the place of the token before.
    depth: levels below the row's last token, 0 for tokens of the row. seen: (rows, 1, width, places) positions of what
    each node attends to, -1 for other places. first: positions before it are not attended to, but for a node's own.
    """

    rows: Tensor
    place: Tensor
    preceding: Tensor
    depth: Tensor
    seen: Tensor
    first: int = 0

    @property
    def extent(self) -> int:
        """Places that may be attended to."""
        return self.seen.shape[-1]

    @property
    def mask(self) -> Tensor:
        """(rows, 1, width, places) bool."""
        if self.first == 0:
            return self.seen >= 0
        own = self.place.clamp_max(self.seen.shape[-1] - 1)  # padding has a place that is never read
        return (self.seen >= self.first).scatter(-1, own[:, None, :, None], True)


class Written(Protocol):
    """Where the nodes of a pass are written, and what they attend to.

    rows: (rows,) their slots. place: (rows, width). mask: (rows, 1, width, extent) bool. extent: places to attend to.
    """

    @property
    def rows(self) -> Tensor: ...
    @property
    def place(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...
    @property
    def extent(self) -> int: ...


@dataclass(frozen=True)
class CachedAttention:
    """Attention of a pass over a layer of its cache; see `_layers.Attend`."""

    layer: RowLayer
    nodes: Written

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.update(key, value)
        return scaled_dot_product_attention(query, keys, values, attn_mask=self.nodes.mask, enable_gqa=True)

    def update(self, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write keys and values, and return those of all places, as a cache of `transformers` does."""
        rows, extent = self.nodes.rows, self.nodes.extent
        for stored, new in ((self.layer.keys, key), (self.layer.values, value)):
            stored[rows[:, None], :, self.nodes.place] = new.transpose(1, 2).to(stored.dtype)
        return self.layer.keys[rows, :, :extent], self.layer.values[rows, :, :extent]


@dataclass(frozen=True)
class NodeAttention(CachedAttention):
    """That of the nodes of drafts, for layers which need more of them than their mask."""

    nodes: PassNodes

    def shifted(self, states: Tensor) -> Tensor:
        """Write the states of the nodes, (rows, width, size), and return those of the tokens before them."""
        rows = self.nodes.rows[:, None]
        self.layer.keys[rows, 0, self.nodes.place] = states.to(self.layer.keys.dtype)
        return self.layer.keys[rows, 0, self.nodes.preceding]

    def from_position(self, first: int) -> NodeAttention:
        """It, without what is before a position; every node still attends to itself."""
        return replace(self, nodes=replace(self.nodes, first=first))


@dataclass(frozen=True)
class PlacedNodes:
    """The nodes of a pass in rows of one width, those of each row from the left.

    slots: of the rows. at: (rows, width) indices of nodes. real: (rows, width) bool, False on padding. position:
    (rows, width). attends: attention over the cache, by layer.
    """

    slots: Sequence[int]
    at: Tensor
    real: Tensor
    position: Tensor
    attends: Sequence[NodeAttention]


def head_pass(head: Any, int8: Int8Copies | None = None) -> HeadPass:
    """The compiled pass of a head where there is one, else that in torch. int8: see `CompiledHeadPass`."""
    try:
        return CompiledHeadPass(head, int8)
    except NotCompilable:
        return TorchHeadPass(head, int8)
