"""Online calibration of a drafter's confidences, by how often earlier nodes of like confidence were right.

The counts name no token. They are kept by namespace all the same: confidences decide which nodes are drafted, so with
counts of all rows a tenant's drafts would depend on the texts of others.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.stores._native import trees
from truedraft.stores.memory import Tenants
from truedraft.tree import DraftTree, Row

Floats = array  # of doubles
STEP = 0.5  # width of a bin of confidences, in log-odds
EDGES = array("d", [1 / (1 + math.exp(-STEP * k)) for k in range(-10, 11)])
PRIOR = 4.0  # weight of the raw confidence, in observations
OTHERS = 3.0  # weight of the rate over the rows of a namespace in that of one row, in observations
LONG, SHORT = 0.995, 0.9  # decay of earlier observations at each new one: over these rows, and within one
NAMESPACES = 1024  # whose counts are kept, a kilobyte each
FOLLOWED = 3  # most drafts of a row that are compared with its output at a time


class BinCounts:
    """Decayed counts by bin of confidence: nodes observed, and those of them that were right."""

    def __init__(self) -> None:
        self.right = array("d", [0.0] * (len(EDGES) + 1))
        self.tried = array("d", [0.0] * (len(EDGES) + 1))


@dataclass(slots=True)
class Followed:
    """A draft with its raw confidences, while it is compared with the output.

    after: tokens that have to be emitted before its first nodes. node: the deepest one reached.
    """

    tree: DraftTree
    after: Sequence[int]
    node: int = 0


@dataclass(slots=True)
class _RowHistory:
    """Of one row.

    observed: its tokens when its drafts were last compared with them. drafts: those that are still compared.
    shared: the counts of its namespace. counts: its own. tallies: both, as `settled` and `follow` take them.
    """

    observed: int
    shared: BinCounts
    counts: BinCounts = field(default_factory=BinCounts)
    drafts: list[Followed] = field(default_factory=list)
    tallies: tuple[Floats, Floats, Floats, Floats, Floats] = field(init=False)

    def __post_init__(self) -> None:
        ours, mine = self.shared, self.counts
        self.tallies = EDGES, ours.right, ours.tried, mine.right, mine.tried

    def settled(self, confidence: tuple[float, ...]) -> tuple[float, ...]:
        """Confidences calibrated for the row; the first is that of a root, and becomes 1."""
        settle = settled if (native := trees()) is None else native.settled
        return settle(confidence, *self.tallies, PRIOR, OTHERS)


class Calibration:
    """Calibrates confidences. A node's confidence is the probability that it is right if its parent is."""

    def __init__(self) -> None:
        self._by_namespace: Tenants[BinCounts] = Tenants(NAMESPACES, BinCounts)
        self._rows: dict[int, _RowHistory] = {}
        self._followed: dict[int, _RowHistory] = {}  # of rows with drafts that are still compared

    def proposed(self, row: Row, tree: DraftTree, after: Sequence[int] = ()) -> DraftTree:
        """A draft with calibrated confidences; it is then compared with the row's output.

        after: tokens drafted before it.
        """
        if tree.confidence is None or len(tree.tokens) == 1:
            return tree
        history = self._history(row)
        if not history.drafts:
            history.observed = len(row.tokens)
            self._followed[id(row)] = history
        if len(history.drafts) < FOLLOWED:
            history.drafts.append(Followed(tree, after))
        return tree.replaced(confidence=history.settled(tree.confidence))

    def settled(self, row: Row, confidence: tuple[float, ...]) -> tuple[float, ...]:
        """See `_RowHistory.settled`."""
        return self._history(row).settled(confidence)

    @property
    def follows(self) -> bool:
        """Whether any drafts are still compared."""
        return bool(self._followed)

    def update(self, rows: Sequence[Row]) -> None:
        """Compare the drafts of rows with the tokens emitted since the last call."""
        for row in rows if self._followed else ():
            if (history := self._followed.get(id(row))) is not None:
                emitted = row.tokens[history.observed :]
                history.drafts = [draft for draft in history.drafts if _advance(history, draft, emitted)]
                history.observed = len(row.tokens)
                if not history.drafts:
                    del self._followed[id(row)]

    def _history(self, row: Row) -> _RowHistory:
        history = self._rows.get(id(row))
        if history is None:
            history = _RowHistory(len(row.tokens), self._by_namespace.of(row.namespace))
            self._rows[id(row)] = history
        return history

    def end(self, row: Row) -> None:
        self._rows.pop(id(row), None)
        self._followed.pop(id(row), None)


def _advance(history: _RowHistory, draft: Followed, emitted: list[int]) -> bool:
    """Follow the emitted tokens down a draft; false where it is wrong or at its end."""
    if draft.after:
        pending = len(draft.after)
        if any(a != b for a, b in zip(draft.after, emitted, strict=False)):
            return False
        draft.after, emitted = draft.after[len(emitted) :], emitted[pending:]
    tree, native = draft.tree, trees()
    assert tree.confidence is not None
    given, walk = (tree.tokens, tree.parent, tree.confidence, tree.probes), follow if native is None else native.follow
    draft.node = walk(given, draft.node, emitted, *history.tallies, LONG, SHORT)
    return draft.node >= 0


def settled(
    confidence: tuple[float, ...], edges: Floats, right: Floats, tried: Floats, mine_right: Floats, mine_tried: Floats,
    prior: float, others: float,
) -> tuple[float, ...]:  # fmt: skip
    """Confidences calibrated by the counts over several rows and of one row; the root's is 1. As in `_trees.c`."""
    found: dict[float, float] = {}
    for raw in set(confidence):
        at = bisect(edges, raw)
        here = (right[at] + prior * raw) / (tried[at] + prior)
        found[raw] = (mine_right[at] + others * here) / (mine_tried[at] + others)
    return (1.0, *[found[raw] for raw in confidence[1:]])


def follow(
    tree: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], frozenset[int]], node: int, emitted: list[int],
    edges: Floats, right: Floats, tried: Floats, mine_right: Floats, mine_tried: Floats, long: float, short: float,
) -> int:  # fmt: skip
    """The node reached by the emitted tokens, -1 where the tree is wrong or ends; updates counts. As in `_trees.c`."""
    tokens, parent, confidence, probes = tree
    for token in emitted:
        child, reached = node, -1
        for _ in range(parent.count(node)):
            child = parent.index(node, child + 1)
            if child in probes:
                continue
            correct = tokens[child] == token and reached < 0
            at = bisect(edges, confidence[child])
            for decay, hits, total in ((long, right, tried), (short, mine_right, mine_tried)):
                hits[at] = hits[at] * decay + correct
                total[at] = total[at] * decay + 1
            if correct:
                reached = child
        if reached < 0:
            return -1
        node = reached
    return node if node in parent else -1
