"""Drafts that grow level by level, each level from next-token distributions at the nodes of the one before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from truedraft.chance import likeliest
from truedraft.drafters._base import Drafter
from truedraft.drafters._candidates import DraftVocabulary, keys_of
from truedraft.runtime._base import GrownTree
from truedraft.tree import DraftTree, Draws, Row


@dataclass(eq=False)
class GrowingTree:
    """One row's draft while it grows: first the row's tokens that its reader has not read, then the tree.

    tokens, parent: of every node; those before `root` are tokens of the row that the reader has still to read.
    root: index of the pending token.
    room: nodes that may still be added.
    deepest: levels that may be added below the root.
    frontier: nodes added at the last level, which the reader's next pass expands.
    laws: node -> the distribution that its children were drawn from.
    score: node -> the method's score of it.
    chance: node -> the probability that it is right if its parent is, as its drafter estimates it.
    arrival: node -> its arrival time, for stochastic beam search.
    place: node -> its place in its level, in trees of a given shape.
    expanded: nodes that were in a frontier.
    state: what else its drafter keeps of it.
    budget: most nodes of the finished draft.
    after: tokens that another drafter has drafted; the root is the last of them, at this depth.
    passes: of its reader, so far.
    shared: token -> that of the reader, where it has other tokens.
    ids: of all nodes, the reader's tokens; those before `root` are its tokens in both lists.
    """

    row: Row
    tokens: list[int]
    root: int
    room: int
    deepest: int
    parent: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=list)
    laws: dict[int, Tensor] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)
    chance: dict[int, float] = field(default_factory=dict)
    arrival: dict[int, float] = field(default_factory=dict)
    place: dict[int, int] = field(default_factory=dict)
    expanded: set[int] = field(default_factory=set)
    state: Any = None
    budget: int = 0
    after: Sequence[int] = ()
    passes: int = 0
    shared: Mapping[int, int] | None = None
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.shared is None:
            self.ids = self.tokens
        self.parent = list(range(-1, self.root))
        self.depth = [len(self.after)] * (self.root + 1)
        self.frontier = [self.root] if self.room > 0 and self.deepest > len(self.after) else []

    def add(self, node: int, tokens: Sequence[int], law: Tensor | None = None) -> list[int]:
        """Add children of a node, as far as `room` allows; returns their indices."""
        added = self.add_each([node] * len(tokens), tokens)
        if law is not None and added:
            self.laws[node] = law
        return added

    def add_each(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Add a child of each of some nodes, which may be among those added before it, as far as `room` allows; returns
        their indices."""
        nodes, tokens = nodes[: self.room], tokens[: self.room]
        first = len(self.tokens)
        self.tokens += tokens
        if self.shared is not None:
            self.ids += [self.shared[token] for token in tokens]
        self.parent += nodes
        for node in nodes:
            self.depth.append(self.depth[node] + 1)
        self.room -= len(tokens)
        return list(range(first, len(self.tokens)))

    def end_level(self, added: Sequence[int], most: int | None = None) -> None:
        """End a level: `added` becomes the frontier, without end tokens and nodes at the greatest depth, and with the
        first `most` of the others."""
        growing, depth, deepest, tokens, ends = self.room > 0, self.depth, self.deepest, self.tokens, self.row.ends
        self.frontier = [n for n in added if growing and depth[n] < deepest and tokens[n] not in ends][:most]

    def take_over(self, grown: GrownTree, tokens: Sequence[int]) -> None:
        """Become a tree that grew from the root alone. tokens: those of the target for its tokens."""
        self.add_each([self.root + parent for parent in grown.parents], tokens)
        kept = grown.kept or range(1, len(tokens) + 1)
        self.score = {self.root + node: grown.scores[node - 1] for node in kept}
        self.expanded = {self.root + node for node in grown.read}
        self.frontier, self.passes = [], grown.passes

    def path(self, node: int) -> list[int]:
        """The tokens drafted up to a node."""
        tokens: list[int] = []
        while node > self.root:
            tokens.append(self.tokens[node])
            node = self.parent[node]
        return [*self.after, *tokens[::-1]]

    def tree(
        self, draws: Draws, chosen: Sequence[int] | None = None, confidence: Sequence[float] | None = None
    ) -> DraftTree:
        """The draft, of the nodes `chosen` (parents before children) or of all nodes.

        confidence: of these, 1 for the root before them.
        """
        nodes = [self.root, *(range(self.root + 1, len(self.tokens)) if chosen is None else chosen)]
        new, tokens, parent = {node: i for i, node in enumerate(nodes)}, self.tokens, self.parent
        return DraftTree(
            tuple([tokens[node] for node in nodes]),
            (-1, *[new[parent[node]] for node in nodes[1:]]),
            None if draws == "certain" else tuple(map(self.laws.get, nodes)),
            draws=draws,
            confidence=None if confidence is None else tuple(confidence),
        )


class LevelReader(Protocol):
    """Computes the distributions that drafts grow from: a draft model or a learned head, with its cache per row."""

    def start(self, rows: Sequence[Row], more: int) -> None:
        """Reserve memory for new rows, with `more` nodes for drafts beyond the end of a row.

        Raises:
            NoRoom: it does not fit in memory; rows that run already are not affected.
        """

    def end(self, row: Row) -> None:
        """Remove a finished row."""

    def catch_up(self, rows: Sequence[Row]) -> None:
        """Read the tokens of running rows, up to a last part that their next pass reads."""

    def tokens_read(self, row: Row, after: int) -> int | None:
        """Tokens of a row that are read; None where the row cannot be read with `after` tokens more."""

    def expand(self, growing: Sequence[GrowingTree]) -> Tensor:
        """One pass: raw logits at the k frontier nodes of all trees, in order, (k, draft vocabulary)."""

    def grown(self, growing: Sequence[GrowingTree]) -> None:
        """The level of the last pass was added to the trees."""


class GrowingDrafter(Drafter):
    """A drafter whose drafts grow level by level; each level is one pass of its reader over all rows.

    shared: see `GrowingTree`.
    any_shape: whether its reader expands any nodes that have been added, not those of the last level alone, so that
        other drafters can grow trees of their own shapes from its distributions (`_shaped.py`).
    """

    shared: Mapping[int, int] | None = None
    any_shape: ClassVar[bool] = False
    prior_confidence = 0.7
    autoregressive = reads_texts = True

    @property
    @abstractmethod
    def reader(self) -> LevelReader:
        """What computes its distributions."""

    @property
    @abstractmethod
    def levels(self) -> int:
        """Depth of a full draft."""

    @abstractmethod
    def grow(self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor) -> None:
        """Add the next level: children of the k `nodes`, by the reader's (k, V) distributions there."""

    def start(self, rows: Sequence[Row]) -> None:
        self.reader.start(rows, self.expansions)

    def end(self, row: Row) -> None:
        self.reader.end(row)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        if not any(budget):
            return [DraftTree.chain(row.tokens[-1]) for row in rows]
        self.reader.catch_up(rows)
        return self._grown([self._growing(row, most) for row, most in zip(rows, budget, strict=True)])

    def _grown(self, growing: Sequence[GrowingTree]) -> list[DraftTree]:
        """The finished drafts."""
        active = growing
        while ready := [tree for tree in active if tree.frontier]:
            active = [tree for tree in ready if self.continues(tree, len(growing), len(ready))]
            if active:
                self._level(active)
        return [self.finished(tree) for tree in growing]

    def continues(self, growing: GrowingTree, rows: int, active: int) -> bool:
        """Whether a draft gets another level; asked no more once it gets none.

        rows: in the pass that verifies. active: drafts that may share the pass of the level.
        """
        return True

    def room(self, budget: int) -> int:
        """Nodes that may be grown for a draft of at most `budget` nodes."""
        return budget

    @property
    def expansions(self) -> int:
        """Most nodes of a draft that the reader reads."""
        return self.room(self.width)

    def finished(self, growing: GrowingTree) -> DraftTree:
        """The draft to verify, from all that was grown."""
        return growing.tree(self.draws if self.preferred(growing.row) == "law" else "certain")

    def _growing(self, row: Row, budget: int, after: Sequence[int] = ()) -> GrowingTree:
        """A row's draft before its first level, behind tokens that another drafter has drafted."""
        deepest = min(len(after) + self.levels, row.room - row.step - 1)
        read = self.reader.tokens_read(row, deepest)
        pending = (after or row.tokens)[-1]
        if read is None:
            unread, deepest = [pending], 0
        else:
            unread = self.unread(row, after, read)
        most = min(budget, self.width)
        tokens = unread if self.shared is None else [*unread[:-1], pending]
        return GrowingTree(
            row, tokens, len(tokens) - 1, self.room(most), deepest, budget=most, after=after, shared=self.shared,
            ids=unread,
        )  # fmt: skip

    def unread(self, row: Row, after: Sequence[int], read: int) -> list[int]:
        """The reader's tokens of a row, and of drafted ones after it, behind the first `read`."""
        return [*row.tokens[read:], *after[max(read - len(row.tokens), 0) :]]

    def _level(self, active: Sequence[GrowingTree]) -> None:
        """One pass of the reader, and the level grown from it."""
        logits = self.reader.expand(active)
        for growing in active:
            growing.expanded.update(growing.frontier)
        self._grow_level(active, logits)
        for growing in active:
            growing.passes += 1
        self.reader.grown(active)

    def _measure(self, seconds: float, begins: bool) -> None:
        """Take account of the time of a level. begins: whether it was the first of a draft."""

    def _grow_level(self, active: Sequence[GrowingTree], logits: Tensor) -> None:
        """Grow the level from the reader's (k, draft vocabulary) logits at the frontier nodes of all trees."""
        at = [(growing, node) for growing in active for node in growing.frontier]
        laws = self.laws([growing.row for growing, _ in at], [growing.path(node) for growing, node in at], logits)
        for growing, own in zip(active, laws.split([len(growing.frontier) for growing in active]), strict=True):
            self.grow(growing, growing.frontier, own)

    def greedy(self, growing: GrowingTree) -> bool:
        """Whether the reader's logits alone decide what is drafted."""
        return by_logits(self, growing.row)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """Of the reader's logits; None where they are those of all tokens."""
        return None

    def laws(self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """(k, V) distributions after k drafted paths, see `laws_of`. logits: (k, draft vocabulary), of the reader."""
        return laws_of(rows, drafts, logits if self.vocabulary is None else self.vocabulary.spread(logits))

    def chosen(self, growing: GrowingTree, node: int, law: Tensor, count: int = 1) -> list[int]:
        """Tokens to draft below a node, in order: sampled, chosen with the target's own noise, or the likeliest."""
        if not law.any():
            return []  # nothing is allowed here, or the draft model's logits are NaN
        row, request = growing.row, growing.row.request
        if self.preferred(row) == "law":
            return request.chance.draw(law, row, count, distinct=self.draws == "distinct")
        return likeliest(keys_of(self, row, law[None], [growing.depth[node]])[0], count)

    def chosen_each(
        self, growing: GrowingTree, nodes: Sequence[int], laws: Tensor, counts: Sequence[int]
    ) -> list[list[int]]:
        """`chosen` at each of some nodes; where tokens are drawn independently of each other, all at once."""
        row = growing.row
        if self.preferred(row) != "law" or self.draws != "independent":
            return [self.chosen(growing, *each) for each in zip(nodes, laws, counts, strict=True)]
        allowed = [place for place, some in enumerate(laws.any(-1).tolist()) if some]
        drawn: list[list[int]] = [[] for _ in nodes]
        if allowed:
            found = row.request.chance.draw_each(laws[allowed], row, [counts[place] for place in allowed])
            for place, tokens in zip(allowed, found, strict=True):
                drawn[place] = tokens
        return drawn


def by_logits(drafter: Drafter, row: Row) -> bool:
    """Whether what is drafted for a row are the tokens of the largest logits, whatever else was asked for."""
    return drafter.preferred(row) == "likeliest" and not row.request.laws.rowwise


def laws_of(rows: Sequence[Row], drafts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """(k, V) draft probabilities after each of k drafted paths, through the processors of each row's request; zeros
    where these are NaN, or where a processor raises.

    logits: (k, V), raw.
    """
    scores = []
    for request, group in groupby(range(len(rows)), lambda i: rows[i].request):
        at = list(group)
        some = slice(at[0], at[-1] + 1)
        try:
            scores.append(request.laws.of_drafts(rows[some], drafts[some], logits[some]))
        except Exception:  # of a processor, at a prefix that may never be emitted: nothing is drafted there
            scores.append(torch.full_like(logits[some], torch.nan))
    return torch.cat(scores).softmax(-1).nan_to_num_(0.0)


def position_laws(rows: Sequence[Row], logits: Tensor) -> Tensor:
    """(rows, positions, V) draft probabilities at the next positions of rows, through the processors of each row's
    request as if the tokens before were the likeliest ones; over a draft vocabulary where that suffices for the rows.

    logits: (rows, positions, V), raw.
    """
    prefixes = [tokens[:i] for tokens in logits.argmax(-1).tolist() for i in range(len(tokens))]
    repeated = [row for row in rows for _ in range(logits.shape[1])]
    return laws_of(repeated, prefixes, logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
