"""Heads that read the target's own keys and values: what they read, their passes, and their state per row.

Keys and values are read where the target keeps them, of what is committed. What is drafted has none yet: a drafted
token reads those before the pending token, a token of the text those before it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from truedraft.caches.rows import RowCache
from truedraft.drafters.heads._head import LearnedHead
from truedraft.drafters.heads._layers import Attend, Rotary
from truedraft.drafters.heads._reader import Branches, HeadReader, RowReader
from truedraft.errors import Refused
from truedraft.runtime.heads import CompiledHeadPass, NodeAttention, PlacedNodes, TorchHeadPass
from truedraft.runtime.native import Op, OpKind
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.panels import Int8Copies
from truedraft.runtime.program import Program
from truedraft.runtime.rotations import CachedKeys, cached_keys
from truedraft.runtime.weights import NotCompilable
from truedraft.targets._base import Target
from truedraft.targets.hostable import keeps_states, layer_types
from truedraft.targets.quirks import window_of
from truedraft.tree import Accepted, Row, Scores

# Attention over keys and values of the target: queries (rows, heads, width, head size) to (rows, heads, width, size of
# a head's values).
Cross = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SourceLayer:
    """A layer of the target whose keys and values are read.

    index: of the layer. keys: what it keeps. window: positions that its own queries see; 0 for all.
    """

    index: int
    keys: CachedKeys
    window: int

    def attend(self, query: Tensor, kv: Sequence[Tensor], positions: Tensor, bounds: Tensor, first: int = 0) -> Tensor:
        """Attention of queries at positions to the entries before their bounds; zeros where there are none.

        Args:
            query: (rows, heads, n, head size). positions, bounds: (n,).
            kv: keys and values, (rows, KV heads, length, head size) each, of the positions from `first` on.
        """
        keys, values = (part.to(query.dtype) for part in kv)
        places = first + torch.arange(keys.shape[2], device=query.device)
        seen = places < bounds[:, None]
        if self.window:
            seen &= positions[:, None] - places < self.window
        some = seen.any(-1, keepdim=True)
        query = self.keys.rotation(query, positions)
        found = scaled_dot_product_attention(query, keys, values, attn_mask=seen | ~some, enable_gqa=True)
        return found.masked_fill(~some, 0.0)


class CrossAttention(nn.Module):
    """Attention over keys and values of the target, with queries and an output of its own.

    Args:
        size: H of the states. heads: of the target. keys: what its layer keeps.
    """

    def __init__(self, size: int, heads: int, keys: CachedKeys):
        super().__init__()
        self.head_dim = keys.size
        self.q_proj = nn.Linear(size, heads * keys.size, bias=False)
        self.o_proj = nn.Linear(heads * keys.value_size, size, bias=False)

    def forward(self, x: Tensor, cross: Cross) -> Tensor:
        """(rows, width, H) to (rows, width, H)."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self.o_proj(cross(query).transpose(1, 2).flatten(2))

    def compile(self, p: Program, source: SourceLayer) -> None:
        """Append its operations, from "h" to what is added to "x"; a pass points them at the keys and values, and at
        the tables of the rotation.

        Raises:
            NotCompilable: values have another size than keys, or heads of which vectors cannot be made.
        """
        keys = source.keys
        if keys.size != keys.value_size or keys.size % 8:
            raise NotCompilable(f"keys of {keys.size} numbers and values of {keys.value_size}")
        heads = len(self.q_proj.weight) // keys.size
        shape: dict[str, Any] = dict(heads=heads, head=keys.size, step=keys.size)
        for name in ("crossing", "crossed"):
            p.buffer(name, heads * keys.size)
        p.linear("h", "crossing", self.q_proj)
        p.op(
            OpKind.PREPARE, src="crossing", other="crossing", dst="crossing", interleaved=keys.rotation.neighbours,
            **shape,
        )  # fmt: skip
        p.op(
            OpKind.CROSS, src="crossing", dst="crossed", kv_heads=keys.heads, scale=keys.size**-0.5,
            window=source.window, **shape,
        )  # fmt: skip
        p.linear("crossed", "x", self.o_proj, add=True)


class CrossingHead(LearnedHead):
    """A head over the embeddings of a text whose layers also attend to the target's keys and values.

    sources: by layer, what it reads.
    runner: computes its passes; None for the best here.
    """

    layers = ()
    sources: Sequence[SourceLayer]
    runner: Any = None

    def fuse(self, features: Tensor) -> Tensor:
        return features

    @abstractmethod
    def forward(self, embeds: Tensor, rotary: Rotary, attends: Sequence[Attend], crosses: Sequence[Cross]) -> Tensor:
        """(rows, width, H) embeddings to states.

        Args:
            attends, crosses: by layer, attention over what was read, and over what the target has.
        """

    @abstractmethod
    def read(
        self, embeds: Tensor, rotary: Rotary, attends: Sequence[NodeAttention], crosses: Sequence[Cross]
    ) -> None:  # fmt: skip
        """Write the keys and values of what `forward` would compute the states of."""

    @abstractmethod
    def compile(self, program: Program) -> None:
        """Append its operations: from embeddings to "x", the states, and "logits"; see `CrossAttention.compile`.

        Raises:
            NotCompilable: there is no compiled pass for it.
        """


def source_layers(model: PreTrainedModel, count: int) -> list[SourceLayer]:
    """The last layers of a target, whose keys and values are read.

    Raises:
        Refused: there are fewer, or they keep other things.
    """
    if keeps_states(model.config):
        raise Refused(f"the keys of {type(model).__name__} cannot be read: it keeps states of the text instead")
    kinds = layer_types(model)
    if count > len(kinds):
        raise Refused(f"blocks={count}: each block reads a layer of the target, which has {len(kinds)}")
    window = window_of(model.config.get_text_config(decoder=True), kinds) or 0
    return [
        SourceLayer(i, cached_keys(model, i, len(kinds)), window if kinds[i] == "sliding_attention" else 0)
        for i in range(len(kinds) - count, len(kinds))
    ]


@dataclass(frozen=True)
class RowNodes:
    """The nodes of a row in a pass. slot: of the target. positions, bounds: (n,)."""

    slot: int
    positions: Tensor
    bounds: Tensor
    last: int  # of the bounds
    first: int  # of the positions


class CrossingPass(TorchHeadPass):
    """The passes of a `CrossingHead` in torch, over its own cache, and the target's row by row, which is not copied.

    target: whose cache is read. slot_rows: row of each of its own slots.
    """

    target: Target
    slot_rows: Sequence[Row]

    @torch.no_grad()
    def read(self, nodes: Nodes, embeds: Tensor, features: Tensor) -> None:
        given, rotary, placed, crosses = self._given(nodes, embeds, features)
        with self._linears.compiled():
            self.head.read(given, rotary, placed.attends, crosses)

    @torch.no_grad()
    def run(self, nodes: Nodes, embeds: Tensor, features: Tensor, gather: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `HeadPass`. features: (nodes,) bounds of what the nodes read of the target."""
        given, rotary, placed, crosses = self._given(nodes, embeds, features)
        with self._linears.compiled():
            states = self.head(given, rotary, placed.attends, crosses)[placed.real]
            return states, self.head.logits(states[list(gather)])

    def _given(self, nodes: Nodes, embeds: Tensor, bounds: Tensor) -> tuple[Tensor, Rotary, PlacedNodes, list[Cross]]:
        placed = self.placed(nodes, embeds.device)
        rows = list(self._rows(placed, bounds))
        crosses = [self._cross(layer, rows) for layer in self.head.sources]
        given = embeds[placed.at].to(self.head.dtype)
        return given, self.head.rotary(given, placed.position), placed, crosses

    def _rows(self, placed: PlacedNodes, bounds: Tensor) -> Iterator[RowNodes]:
        for slot, at, real, position in zip(placed.slots, placed.at, placed.real, placed.position, strict=True):
            own = bounds[at[real].to(bounds.device)]
            positions = position[real]
            yield RowNodes(
                self.slot_rows[slot].slot, positions, own.to(positions.device), int(own.max()), int(positions.min())
            )

    def _cross(self, layer: SourceLayer, rows: Sequence[RowNodes]) -> Cross:
        keys, values = self.target.committed_kv(layer.index)

        def cross(query: Tensor) -> Tensor:
            found = query.new_zeros(*query.shape[:3], values.shape[-1])
            for i, row in enumerate(rows):
                count = len(row.positions)
                first = max(row.first - layer.window + 1, 0) if layer.window else 0
                some = slice(min(first, row.last), max(row.last, 1))
                kv = [part[row.slot, :, some][None] for part in (keys, values)]
                found[i, :, :count] = layer.attend(
                    query[i, None, :, :count], kv, row.positions, row.bounds, some.start
                )[0]
            return found

        return cross


class CompiledCrossingPass(CompiledHeadPass):
    """The compiled pass of a `CrossingHead`, which reads the target's keys and values where they are.

    target, slot_rows: see `CrossingPass`.
    """

    target: Target
    slot_rows: Sequence[Row]

    def attach(self, cache: RowCache | None) -> None:
        super().attach(cache)
        self._seen, self._read = list[tuple[int, int]](), list[list[Tensor]]()  # what the operations point at
        if cache is None:
            return
        positions = torch.arange(cache.cursor.capacity)
        self._turns = [layer.keys.rotation.columns(positions, self.model.dtype) for layer in self._head.sources]
        for op, (cos, sin) in zip(self._of_kind(OpKind.PREPARE), self._turns, strict=True):
            op.cosine, op.sine, op.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[1]

    @property
    def _head(self) -> Any:
        return self.model

    def _of_kind(self, kind: OpKind) -> list[Op]:
        """The operations of a kind that have no keys and values of the head's own cache, by layer."""
        pairs = zip(self.program.ops, self.program.layers, strict=True)
        return [op for op, own in pairs if op.kind == kind and own < 0]

    def _give(self, features: Tensor) -> None:
        """Point the operations at the target's keys and values, which move when its cache grows. features: (nodes,)
        bounds."""
        self._bounds = features.tolist()
        kept = [self.target.committed_kv(layer.index) for layer in self._head.sources]
        dtype = self.model.dtype  # that of the target, so that nothing is copied
        self._read = [[part.to(dtype).contiguous() for part in pair] for pair in kept]
        self._slots, _, self._places, _ = kept[0][0].shape
        seen = [(keys.data_ptr(), values.data_ptr()) for keys, values in self._read]
        if seen == self._seen:
            return
        self._seen, self._variants = seen, {}
        for op, (keys, values) in zip(self._of_kind(OpKind.CROSS), seen, strict=True):
            op.keys, op.values = keys, values

    def _complete(self, nodes: Nodes, numbers: dict[str, int], lists: dict[str, Sequence[int]]) -> None:
        numbers |= {
            "sources": self._places, "source_slots": self._slots, "longest": max(nodes.longest, *self._bounds),
        }  # fmt: skip
        lists |= {
            "source_lengths": self._bounds, "source_slot": [self.slot_rows[slot].slot for slot in nodes.slot],
        }  # fmt: skip


def crossing_pass(head: CrossingHead, int8: Int8Copies | None = None) -> CompiledCrossingPass | CrossingPass:
    """The compiled pass of a head where there is one, else that in torch. int8: see `CompiledHeadPass`."""
    try:
        return CompiledCrossingPass(head, int8)
    except NotCompilable:
        return CrossingPass(head, int8)


class CrossingReader(HeadReader):
    """A `CrossingHead` as a `LevelReader`. A row's token i is read at place and position i, with the target's keys and
    values before it, and a drafted token with those before the pending one."""

    def __init__(self, head: CrossingHead, int8: Int8Copies | None = None):
        self.crossing = head.runner or crossing_pass(head, int8)
        RowReader.__init__(self, head, self.crossing)
        self.crossing.slot_rows = self.slot_rows
        self._branches: dict[int, Branches] = {}

    def observe(self, rows: Sequence[Row], scores: Scores, accepted: Sequence[Accepted]) -> None:
        """Does nothing: the target keeps what is read of it."""

    def tokens_read(self, row: Row, after: int) -> int | None:
        return len(row.tokens) - 1 if row in self.slot_rows else None

    def _backlog(self, row: Row) -> int:
        assert self._cache is not None
        return self._length(row) - self._cache.lengths[self.slot_rows.index(row)]

    @staticmethod
    def _length(row: Row) -> int:
        """Tokens of a row, the pending one and those of an embedded prompt included."""
        embedded = row.given is not None and row.given.embeds is not None
        return len(row.tokens) + (len(row.given) if embedded and row.given is not None else 0)

    def _next_inputs(self, row: Row, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self._embeds(row, first, count), torch.arange(first, first + count)

    def _add_frontier(
        self, branches: Branches, nodes: Nodes, embeds: list[Tensor], features: list[Tensor]
    ) -> None:  # fmt: skip
        branches.add_frontier(nodes)
        tree = branches.tree
        device = next(self.head.parameters()).device
        embeds.append(self.head.embed(torch.tensor([tree.tokens[node] for node in tree.frontier], device=device)))
        features.append(torch.full((len(tree.frontier),), branches.position))
