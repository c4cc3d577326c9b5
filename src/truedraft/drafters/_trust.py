"""What a drafter's own estimates are worth: how often nodes of which it hoped as much were right."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.tree import DraftTree, Row

STEP = 0.5  # of the log-odds, between one bin of estimates and the next
EDGES = [1 / (1 + math.exp(-STEP * k)) for k in range(-10, 11)]
PRIOR = 4.0  # observations that an estimate itself counts for
OTHERS = 3.0  # observations that what is known of other rows counts for
LONG, SHORT = 0.995, 0.9  # weight that an observation keeps at each later one: over all rows, and within one
FOLLOWED = 3  # drafts of a row that are compared with what is said, at a time


@dataclass
class Tally:
    """Observations by bin of the estimate, the recent ones counting most."""

    memory: float
    right: list[float] = field(default_factory=lambda: [0.0] * (len(EDGES) + 1))
    tried: list[float] = field(default_factory=lambda: [0.0] * (len(EDGES) + 1))

    def add(self, at: int, right: bool) -> None:
        self.right[at] = self.right[at] * self.memory + right
        self.tried[at] = self.tried[at] * self.memory + 1


@dataclass
class Followed:
    """A draft, with its estimates as they came, that is still compared with what is said.

    ahead: what has to be said before its first nodes. node: reached.
    """

    tree: DraftTree
    ahead: Sequence[int]
    node: int = 0

    def children(self) -> list[int]:
        return [i for i, parent in enumerate(self.tree.parent) if parent == self.node]


@dataclass
class _Known:
    """Of one row: its tally, the drafts still compared with what is said, and how much of it was."""

    tally: Tally
    heard: int
    drafts: list[Followed] = field(default_factory=list)


class Trust:
    """Sets estimates right. A node's estimate is the chance that it is right if its parent is."""

    def __init__(self) -> None:
        self._all = Tally(LONG)
        self._rows: dict[int, _Known] = {}

    def proposed(self, row: Row, tree: DraftTree, ahead: Sequence[int] = ()) -> DraftTree:
        """A draft with its estimates set right; it is compared with what the row will say.

        ahead: what it stands behind.
        """
        if tree.hopes is None or len(tree) == 1:
            return tree
        known = self._known(row)
        if len(known.drafts) < FOLLOWED:
            known.drafts.append(Followed(tree, ahead))
        ours, mine = self._all, known.tally
        found: dict[float, float] = {}
        for raw in set(tree.hopes[1:]):
            at = bisect(EDGES, raw)
            here = (ours.right[at] + PRIOR * raw) / (ours.tried[at] + PRIOR)
            found[raw] = (mine.right[at] + OTHERS * here) / (mine.tried[at] + OTHERS)
        hopes = (1.0, *[found[raw] for raw in tree.hopes[1:]])
        return DraftTree(tree.tokens, tree.parent, tree.dist, tree.probes, tree.draws, hopes)

    def heard(self, row: Row) -> None:
        """The row went on."""
        known = self._known(row)
        said, known.heard = row.tokens[known.heard :], len(row.tokens)
        known.drafts = [draft for draft in known.drafts if self._goes_on(known.tally, draft, said)]

    def _goes_on(self, tally: Tally, draft: Followed, said: Sequence[int]) -> bool:
        """Follow what was said; false where the draft has gone wrong or is at its end."""
        tree, waits = draft.tree, len(draft.ahead)
        assert tree.hopes is not None
        if any(a != b for a, b in zip(draft.ahead, said, strict=False)):
            return False
        draft.ahead, said = draft.ahead[len(said) :], said[waits:]
        for token in said:
            reached = -1
            for child in draft.children():
                if child in tree.probes:
                    continue
                right = tree.tokens[child] == token and reached < 0
                at = bisect(EDGES, tree.hopes[child])
                self._all.add(at, right)
                tally.add(at, right)
                if right:
                    reached = child
            if reached < 0:
                return False
            draft.node = reached
        return bool(draft.children())

    def _known(self, row: Row) -> _Known:
        if id(row) not in self._rows:
            self._rows[id(row)] = _Known(Tally(SHORT), len(row.tokens))
        return self._rows[id(row)]

    def end(self, row: Row) -> None:
        self._rows.pop(id(row), None)
