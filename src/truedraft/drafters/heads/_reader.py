"""Heads run beside the target: features that they have not read, their KV per row, and the passes of drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from truedraft.caches.rows import RowCache
from truedraft.drafters._growing import GrowingTree
from truedraft.drafters.heads._head import Head, LearnedHead
from truedraft.runtime.heads import head_pass
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.panels import Int8Copies
from truedraft.targets.memory import check_room
from truedraft.tree import Accepted, Row, Scores

CHUNK = 256  # most tokens of a row that a pass reads before the one that drafts
FEW = 16  # most tokens that the pass that drafts reads: it computes more of a token than the passes before it


class Unread:
    """Features of a row's tokens that the head has not read, in order."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def add(self, features: Tensor) -> None:
        """Append features, (count, size)."""
        self._parts.append(features)

    def take(self, count: int) -> Tensor:
        """Remove and return the first `count`."""
        whole = torch.cat(self._parts) if len(self._parts) > 1 else self._parts[0]
        self._parts = [whole[count:].clone()] if len(whole) > count else []
        return whole[:count]


@dataclass
class Branches:
    """The nodes of a growing tree that the head has read in this draft.

    slot: of its row. length: places of the row's own tokens. position: of the root. seen: node -> the places of it and
    its ancestors behind the row's own. states: node -> its state.
    """

    tree: GrowingTree
    slot: int
    length: int
    position: int
    seen: dict[int, tuple[int, ...]]
    states: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.written = self.length  # places in use

    def add_frontier(self, nodes: Nodes) -> None:
        """Add the frontier of the tree to the nodes of a pass."""
        tree = self.tree
        for node in tree.frontier:
            above = self.seen[tree.parent[node]]
            self.seen[node] = (*above, self.written)
            nodes.add_node(self.slot, self.position + tree.depth[node], self.written, self.length, above)
            self.written += 1
        nodes.group(len(tree.frontier))


class RowReader:
    """What a head has read of each row: a KV cache of its own, a slot per row, and the features that it has not read.

    Features come from the target's passes (`observe`) and are kept until the head reads them.

    slot_rows: row of each slot.
    """

    def __init__(self, head: LearnedHead, passes: Any):
        self.head, self.passes = head, passes
        self._cache: RowCache | None = None
        self.slot_rows: list[Row] = []
        self._unread: dict[int, Unread] = {}

    @property
    def name(self) -> str:
        """How passes are computed."""
        return self.passes.name

    def start(self, rows: Sequence[Row], more: int) -> None:
        """Give new rows slots of the cache, which grows for them; see `LevelReader`."""
        count = len(self.slot_rows) + len(rows)
        longest = max(max(row.prompt, len(row.given or ())) + row.room for row in [*self.slot_rows, *rows])
        capacity = longest + more + 2  # the last is for padding
        cache = self._cache
        if cache is None or cache.cursor.slots < count or cache.cursor.capacity < capacity:
            self._cache = self._grown(count, capacity)
            self.passes.attach(self._cache)
        assert self._cache is not None
        for row in rows:
            self.slot_rows.append(row)
            self._cache.lengths.append(0)
            self._unread[id(row)] = Unread()

    def _grown(self, slots: int, capacity: int) -> RowCache:
        """A larger cache with the same contents.

        Raises:
            NoRoom: it does not fit in memory.
        """
        old, config = self._cache, self.head.config
        weight = next(self.head.parameters())
        if old is not None:
            slots, capacity = max(slots, 2 * old.cursor.slots), max(capacity, old.cursor.capacity)
        check_room(config, self.head.cached_layers, slots, capacity, weight.dtype, weight.device)
        cache = RowCache(self.head.cached_layers, slots, capacity)
        self.head.allocate(cache)
        if old is not None:
            for layer, before in zip(cache.layers, old.layers, strict=True):
                for kept, written in ((layer.keys, before.keys), (layer.values, before.values)):
                    kept[: written.shape[0], :, : written.shape[2]] = written
            cache.lengths.extend(old.lengths)
        return cache

    def end(self, row: Row) -> None:
        if row in self.slot_rows:
            slot = self.slot_rows.index(row)
            self._unread.pop(id(row), None)
            if self._cache is not None and slot < len(self._cache.lengths):
                self._cache.release(slot)
            self.slot_rows[slot] = self.slot_rows[-1]
            self.slot_rows.pop()
        if not self.slot_rows:
            self._cache = None
            self.passes.attach(None)

    def observe(self, rows: Sequence[Row], scores: Scores, accepted: Sequence[Accepted]) -> None:
        """Keep the features of the tokens that a pass of the target has read for good."""
        for place, (row, one) in enumerate(zip(rows, accepted, strict=True)):
            if not one.ended and id(row) in self._unread:
                self._unread[id(row)].add(scores.features(place, one.path, self.head.layers))

    def tokens_read(self, row: Row, after: int) -> int | None:
        if row not in self.slot_rows:
            return None
        unread = len(self._unread[id(row)])
        return max(len(row.tokens) - unread, 0) if unread else None


class HeadReader(RowReader):
    """An autoregressive head as a `LevelReader`.

    A row's token i + 1 is read with the feature of token i, at place and position i; its first token is not read.
    """

    def __init__(self, head: Head, int8: Int8Copies | None = None):
        super().__init__(head, head.runner or head_pass(head, int8))
        self._branches: dict[int, Branches] = {}

    def end(self, row: Row) -> None:
        self._branches.pop(id(row), None)
        super().end(row)

    def catch_up(self, rows: Sequence[Row]) -> None:
        self._branches.clear()
        for row in rows:
            while (backlog := self._backlog(row)) > FEW:
                self._read([row], [min(CHUNK, backlog - 1)])

    def _backlog(self, row: Row) -> int:
        """Tokens of a row that can be read, and are not."""
        return len(self._unread[id(row)])

    def _read(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Read the next tokens of rows, without states and logits."""
        nodes, embeds, features = Nodes(), list[Tensor](), list[Tensor]()
        for row, count in zip(rows, counts, strict=True):
            self._add_tokens(row, count, nodes, embeds, features)
        self.passes.read(nodes, joined(embeds), joined(features))

    def _add_tokens(
        self, row: Row, count: int, nodes: Nodes, embeds: list[Tensor], features: list[Tensor]
    ) -> None:  # fmt: skip
        """The next `count` tokens of a row, with their features, which are then read."""
        assert self._cache is not None
        slot = self.slot_rows.index(row)
        first = self._cache.lengths[slot]
        nodes.add_chain(slot, first, None, count)
        for inputs, given in zip((embeds, features), self._next_inputs(row, first, count), strict=True):
            inputs.append(given)
        self._cache.lengths[slot] += count

    def _next_inputs(self, row: Row, first: int, count: int) -> tuple[Tensor, Tensor]:
        """What the head reads at the next `count` places of a row, from `first` on: embeddings, and features."""
        fused = self.passes.fuse(self._unread[id(row)].take(count).to(self.head.dtype))
        return self._beside(row, first, fused), fused

    def _beside(self, row: Row, place: int, features: Tensor) -> Tensor:
        """What the head reads beside features, (count, H), from a place on: the embeddings of the tokens after them."""
        return self._embeds(row, place + 1, len(features))

    def _embeds(self, row: Row, first: int, count: int) -> Tensor:
        """(count, H) embeddings of a row's tokens from a position on."""
        device = next(self.head.parameters()).device
        given = None if row.given is None else row.given.embeds
        if given is None:
            return self.head.embed(torch.tensor(row.tokens[first : first + count], device=device))
        last = first + count - len(given)  # embedded prompts have no token ids
        tokens = torch.tensor(row.tokens[max(last - count, 0) : max(last, 0)], dtype=torch.long, device=device)
        return torch.cat([given[first : first + count].to(self.head.dtype), self.head.embed(tokens)])

    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        nodes, embeds, features, gather = Nodes(), list[Tensor](), list[Tensor](), list[int]()
        order = sorted(growing, key=lambda tree: self.slot_rows.index(tree.row))
        for tree in order:
            if id(tree.row) in self._branches:
                gather += range(len(nodes), len(nodes) + len(tree.frontier))
                self._add_frontier(self._branches[id(tree.row)], nodes, embeds, features)
            else:
                self._begin(tree, nodes, embeds, features)
                gather.append(len(nodes) - 1)
        states, logits = self.passes.run(nodes, joined(embeds), joined(features), gather)
        places = self._placed(order, states if len(gather) == len(states) else states[gather])
        if [id(tree) for tree in order] != [id(tree) for tree in growing]:
            logits = logits[[place for tree in growing for place in places[id(tree)]]]
        return logits

    def _begin(self, tree: GrowingTree, nodes: Nodes, embeds: list[Tensor], features: list[Tensor]) -> None:
        """The unread tokens of a row; the last one is the root of its tree."""
        assert self._cache is not None
        self._add_tokens(tree.row, self._backlog(tree.row), nodes, embeds, features)
        slot = self.slot_rows.index(tree.row)
        length = self._cache.lengths[slot]
        self._branches[id(tree.row)] = self._rooted(tree, slot, length)

    def _rooted(self, tree: GrowingTree, slot: int, length: int) -> Branches:
        """A growing tree whose root is at the last of the places that are read."""
        return Branches(tree, slot, length, length - 1, {tree.root: ()})

    def _add_frontier(self, branches: Branches, nodes: Nodes, embeds: list[Tensor], features: list[Tensor]) -> None:
        """The frontier of a tree, each node with the state of its parent as its feature."""
        tree = branches.tree
        above = torch.stack([branches.states[tree.parent[node]] for node in tree.frontier])
        branches.add_frontier(nodes)
        tokens = torch.tensor([tree.tokens[node] for node in tree.frontier], device=above.device)
        embeds.append(self.head.embed(tokens))
        features.append(above)

    def _placed(self, order: Sequence[GrowingTree], states: Tensor) -> dict[int, list[int]]:
        """Where the frontier nodes of each tree are in the states of the pass, which are kept."""
        places: dict[int, list[int]] = {}
        first = 0
        for tree in order:
            places[id(tree)] = list(range(first, first + len(tree.frontier)))
            kept = states[first : first + len(tree.frontier)].unbind()
            self._branches[id(tree.row)].states |= dict(zip(tree.frontier, kept, strict=True))
            first += len(tree.frontier)
        return places

    def grown(self, growing: Sequence[GrowingTree]) -> None:
        """Does nothing: the cache keeps what was read until the next draft."""


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts, in order; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
