"""What a drafter's own estimates are worth: how often nodes of which it hoped as much were right."""

from __future__ import annotations

import math
from array import array
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from truedraft.stores._native import trees
from truedraft.tree import DraftTree, Row

Floats = array  # of doubles
STEP = 0.5  # of the log-odds, between one bin of estimates and the next
EDGES = array("d", [1 / (1 + math.exp(-STEP * k)) for k in range(-10, 11)])
PRIOR = 4.0  # observations that an estimate itself counts for
OTHERS = 3.0  # observations that what is known of other rows counts for
LONG, SHORT = 0.995, 0.9  # weight that an observation keeps at each later one: over all rows, and within one
FOLLOWED = 3  # drafts of a row that are compared with what is said, at a time


class Tally:
    """Observations by bin of the estimate: how many, and of these how often it was right."""

    def __init__(self) -> None:
        self.right = array("d", [0.0] * (len(EDGES) + 1))
        self.tried = array("d", [0.0] * (len(EDGES) + 1))


@dataclass(slots=True)
class Followed:
    """A draft, with its estimates as they came, that is still compared with what is said.

    ahead: what has to be said before its first nodes. node: reached.
    """

    tree: DraftTree
    ahead: Sequence[int]
    node: int = 0


@dataclass(slots=True)
class _Known:
    """Of one row: its tally, the drafts still compared with what is said, and how much of it was."""

    heard: int
    tally: Tally = field(default_factory=Tally)
    drafts: list[Followed] = field(default_factory=list)


class Trust:
    """Sets estimates right. A node's estimate is the chance that it is right if its parent is."""

    def __init__(self) -> None:
        self._all = Tally()
        self._rows: dict[int, _Known] = {}

    def proposed(self, row: Row, tree: DraftTree, ahead: Sequence[int] = ()) -> DraftTree:
        """A draft with its estimates set right; it is compared with what the row will say.

        ahead: what it stands behind.
        """
        if tree.confidence is None or len(tree) == 1:
            return tree
        known = self._known(row)
        if len(known.drafts) < FOLLOWED:
            known.drafts.append(Followed(tree, ahead))
        ours, mine, native = self._all, known.tally, trees()
        settle = settled if native is None else native.settled
        confidence = settle(tree.confidence, EDGES, ours.right, ours.tried, mine.right, mine.tried, PRIOR, OTHERS)
        return replace(tree, confidence=confidence)

    def heard(self, row: Row) -> None:
        """The row went on."""
        known = self._known(row)
        if known.drafts:
            said = row.tokens[known.heard :]
            known.drafts = [draft for draft in known.drafts if self._goes_on(known.tally, draft, said)]
        known.heard = len(row.tokens)

    def _goes_on(self, mine: Tally, draft: Followed, said: Sequence[int]) -> bool:
        """Follow what was said; false where the draft has gone wrong or is at its end."""
        if draft.ahead:
            waits = len(draft.ahead)
            if any(a != b for a, b in zip(draft.ahead, said, strict=False)):
                return False
            draft.ahead, said = draft.ahead[len(said) :], said[waits:]
        ours, tree, native = self._all, draft.tree, trees()
        assert tree.confidence is not None
        go = follow if native is None else native.follow
        draft.node = go(
            (tree.tokens, tree.parent, tree.confidence, tree.probes), draft.node, list(said),
            EDGES, ours.right, ours.tried, mine.right, mine.tried, LONG, SHORT,
        )  # fmt: skip
        return draft.node >= 0

    def _known(self, row: Row) -> _Known:
        known = self._rows.get(id(row))
        if known is None:
            known = self._rows[id(row)] = _Known(len(row.tokens))
        return known

    def end(self, row: Row) -> None:
        self._rows.pop(id(row), None)


def settled(
    confidence: tuple[float, ...], edges: Floats, right: Floats, tried: Floats, mine_right: Floats, mine_tried: Floats,
    prior: float, others: float,
) -> tuple[float, ...]:  # fmt: skip
    """Estimates set right by what became of such ones, of all rows and of one; the root's is 1. As in `_trees.c`."""
    found: dict[float, float] = {}
    for raw in set(confidence):
        at = bisect(edges, raw)
        here = (right[at] + prior * raw) / (tried[at] + prior)
        found[raw] = (mine_right[at] + others * here) / (mine_tried[at] + others)
    return (1.0, *[found[raw] for raw in confidence[1:]])


def follow(
    tree: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], frozenset[int]], node: int, said: list[int],
    edges: Floats, right: Floats, tried: Floats, mine_right: Floats, mine_tried: Floats, long: float, short: float,
) -> int:  # fmt: skip
    """The node reached by what was said, -1 where the tree went wrong or ends; nodes are counted. As in `_trees.c`."""
    tokens, parent, confidence, probes = tree
    for token in said:
        child, reached = node, -1
        for _ in range(parent.count(node)):
            child = parent.index(node, child + 1)
            if child in probes:
                continue
            good = tokens[child] == token and reached < 0
            at = bisect(edges, confidence[child])
            for kept, was, of in ((long, right, tried), (short, mine_right, mine_tried)):
                was[at] = was[at] * kept + good
                of[at] = of[at] * kept + 1
            if good:
                reached = child
        if reached < 0:
            return -1
        node = reached
    return node if node in parent else -1
