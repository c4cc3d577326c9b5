"""The contract of what computes passes: the model's own forward, captured graphs, compiled code."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from truedraft.tree import DraftTree, Piece, Prompt, Scores, Taps
from truedraft.views._base import Reduction, Rounded, View

PROMPT = 512  # most positions of prompts in one call


class GreedyChain(NamedTuple):
    """A chain of likeliest tokens.

    most: of its tokens. ends: tokens that it ends with. least: it ends with a token of lower probability too.
    columns: (n,) int64, the tokens considered, ascending; a number for the first so many.
    """

    most: int
    ends: Sequence[int]
    least: float
    columns: Tensor | int


class TreeGrowth(NamedTuple):
    """How trees of likeliest tokens grow, level by level, by the probabilities of their paths.

    children: of a node, at most. beam: so many paths of a level are added; 0: all. kept: so many nodes of the likeliest
        paths remain, and those of them that are not expanded yet are next; 0: all remain, and the last level is next.
    width: nodes expanded at a level. levels: passes at most. decay: of a path's probability per level.
    sure: (below this probability of the likeliest token, so many children), ascending.
    places: nodes are added in the order of their places' values instead, as `dyspec` does: that of the next child of a
        node is the probability of its path and of none of its children so far. Places of less than the probability of
        a node that may still be expanded wait for it, and those of less than `threshold` stay empty.
    nodes: of the likeliest paths, those that count for costs and gains.
    plain, node, level: seconds of a tree's share of a plain pass, of each further node, and of a level of all trees;
        plain 0: costs end no tree. more: levels that a further one is reckoned with.
    gain: a level that adds less to the probabilities of all paths is the last.
    rank: address of the compiled function that ranks logits, see `native/trees.inc`.
    """

    children: int
    width: int
    levels: int
    beam: int = 0
    kept: int = 0
    decay: float = 1.0
    sure: Sequence[tuple[float, int]] = ()
    places: bool = False
    threshold: float = 0.0
    nodes: int = 0
    plain: float = 0.0
    node: float = 0.0
    level: float = 0.0
    more: int = 1
    gain: float = -math.inf
    rank: int = 0


class TreeLimits(NamedTuple):
    """Limits of one of these trees.

    most: nodes that are added. deepest: levels. budget: nodes of the finished draft. ends: tokens without children.
    columns: see `GreedyChain`. shape: numbers of children, node after node and level after level; None: no given shape.
    """

    most: int
    deepest: int
    budget: int
    ends: Sequence[int]
    columns: Tensor | int
    shape: Sequence[int] | None = None


class GrownTree(NamedTuple):
    """Nodes added below a root, which is node 0.

    tokens, parents, scores: of the nodes from 1 on, with the probabilities of their paths. read: the nodes that passes
    read, in order, the root first. kept: those that remain, the likeliest first. passes: that it had.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    read: list[int]
    kept: list[int]
    passes: int


class Runner(ABC):
    """Runs the passes of one model over the slots of the cache that is attached.

    name: how it computes passes, as reports show it.
    batch_invariant: whether the logits of a node have the same bits whatever else is in the pass.
    padded: whether every row of a pass costs as many nodes as its widest tree has.
    extent: the positions of a row in a cache are a multiple of it, so that calls of similar length can use it again.
    cold: whether the last pass was slower than later ones of its size, because it was captured first.
    cache: the one that passes read and write.
    on_read: called after each call over prompts of `prefill`, with its positions; None for nothing.
    """

    name: str
    cache: Any
    batch_invariant: ClassVar[bool] = False
    padded: ClassVar[bool] = True
    extent: ClassVar[int] = 1
    cold: bool = False
    on_read: Callable[[int], None] | None = None

    @property
    def changed(self) -> bool:
        """Whether what was measured for it does not hold any more."""
        return False

    @property
    def under_views(self) -> str:
        """How it computes passes under views."""
        return self.name

    @property
    @abstractmethod
    def granularity(self) -> int:
        """Prompts that are read in pieces are computed in spans that end at multiples of so many positions, so that the
        bits of a row depend on its own tokens alone; 1 where they depend on no split."""

    @abstractmethod
    def attach(self, cache: Any) -> None:
        """Set the cache (`RowCache` or `Seq2SeqCache`) of the following passes; None detaches it.

        Raises:
            NotCompilable: there is no such pass over this cache.
        """

    def kept(self, rows: int, capacity: int) -> Any:
        """The cache of an earlier call, emptied, where it is idle and large enough, and passes depend on it; else None,
        and none is kept any more."""
        return None

    def over(self, cache: Any) -> AbstractContextManager[None]:
        """A context in which passes read and write another cache: chosen entries of the attached one."""
        return self._over(cache)

    @contextmanager
    def _over(self, cache: Any) -> Iterator[None]:
        attached, self.cache = self.cache, cache
        try:
            yield
        finally:
            self.cache = attached

    @abstractmethod
    def prefill(self, prompts: Sequence[Prompt], taps: Taps) -> Scores:
        """Read the prompts of new rows into the next free slots.

        Returns:
            Logits (rows, 1, V) of their last tokens. These are not committed: each is the root of its row's next tree.
        """

    @abstractmethod
    def read_pieces(self, pieces: Sequence[Piece], taps: Taps) -> list[Scores]:
        """Read pieces of prompts, all of tokens or all of embeddings; at most PROMPT positions in all.

        Returns:
            By piece, logits (1, `piece.scores`, V) of its last positions, and hidden states of all positions.
        """

    @abstractmethod
    def check_taps(self, taps: Taps) -> None:
        """Raises Refused, in one sentence, where this model has no such layers, or they are not found."""

    @abstractmethod
    def reduced(self, view: View) -> Reduction:
        """What passes under a view leave out.

        Raises:
            Refused: this model cannot run under it.
        """

    def round_entries(self, entries: Rounded, slots: Sequence[int]) -> None:
        """Bring the copies of the cache's entries that are read in fewer bits up to date, in these slots; of runners
        whose `reduced` refuses no such view.

        Raises:
            NoRoom: they do not fit in free memory.
        """
        raise NotImplementedError

    @abstractmethod
    def queries(self, trees: Sequence[DraftTree]) -> list[Tensor]:
        """By layer of the cache, the queries at the roots of one tree per slot in use, in a pass of the whole model:
        (rows, heads of keys, queries of each, size), scaled."""

    @abstractmethod
    def score(self, trees: Sequence[DraftTree], taps: Taps, view: View | None = None) -> Scores:
        """Logits (rows, width, V) at every node of one tree per slot in use, of the whole model or under a view; what
        is written is not committed.

        Raises:
            NotCompilable: the pass cannot be computed this way; nothing was committed.
            Refused: see `reduced`.
        """

    def extend(
        self, trees: Sequence[DraftTree], written: Sequence[int], last: Sequence[int], taps: Taps
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Score the nodes of one tree per slot in use behind its first ones, which earlier passes wrote; see
        `Target.extend_tapped`. Here these are computed again."""
        scores = self.score(trees, taps)
        spans = [slice(len(tree) - count, len(tree)) for tree, count in zip(trees, last, strict=True)]

        def at_last(rows: Iterable[Tensor]) -> Tensor:
            return torch.cat([row[span] for row, span in zip(rows, spans, strict=True)])

        return at_last(scores.logits), {layer: at_last(states) for layer, states in scores.hidden.items()}

    def extend_greedily(
        self, trees: Sequence[DraftTree], written: Sequence[int], chains: Sequence[GreedyChain | None]
    ) -> list[list[int]] | None:
        """The tokens of a chain behind the last node of each tree that has one, in one call; see
        `Target.extend_greedily`. None where a call makes one pass."""
        return None

    def extend_trees(
        self,
        trees: Sequence[DraftTree],
        written: Sequence[int],
        growth: TreeGrowth,
        limits: Sequence[TreeLimits | None],
    ) -> tuple[list[GrownTree | None], list[float]] | None:
        """What grows behind the last node of each tree that has limits, in one call; see `Target.extend_trees`. None
        where a call makes one pass."""
        return None
