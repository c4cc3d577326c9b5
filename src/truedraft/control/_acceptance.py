"""How often drafted tokens are accepted: by row, from everything that its drafts and its text had in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.tree import DraftTree, Row

DOUBT = (
    10.0  # nodes that an expectation counts for which has not been compared with passes: the best drafts seem better
)
KEPT = 0.97  # weight that verified nodes keep at each later pass


@dataclass
class AcceptanceRates:
    """Rates of the first, second, ... child of an accepted node, by depth; the recent past counts most.

    Sequoia's positional acceptance (arXiv 2402.12374), estimated from one row while it is decoded. A rate is
    conditional: of a node whose parent is accepted.

    memory: weight that an observation keeps at each later one.
    first, later: rates before any observation, of first children of the root and of deeper nodes; each next sibling has
        half of it.
    """

    memory: float
    first: float
    later: float
    _seen: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # (accepted, tried)

    def add(self, depth: int, order: int, accepted: bool) -> None:
        """A child of that `order` (0 the first), `depth` levels below the root, under an accepted node."""
        for key in ((depth, order), (0, order)) if depth > 1 else ((depth, order),):
            before, tried = self._seen.get(key, (0.0, 0.0))
            self._seen[key] = before * self.memory + accepted, tried * self.memory + 1

    def rate(self, depth: int, order: int) -> float:
        """Of such children; below the first level, what was not observed at a depth is taken from all others."""
        rate = (self.later if depth > 1 else self.first) * 0.5**order
        for key in ((0, order), (depth, order)) if depth > 1 else ((depth, order),):
            accepted, tried = self._seen.get(key, (0.0, 0.0))
            rate = (accepted + rate) / (tried + 1)
        return rate

    def of_paths(self, tree: DraftTree) -> list[float]:
        """The probability of every node that its whole path is accepted; 1 for the root, 0 for probes.

        Products of the drafter's confidence along the path, where the tree has any, else of the rates.
        """
        confidence: Sequence[float]
        if tree.confidence is not None:
            confidence = tree.confidence
        else:
            shape = tree.shape
            confidence = [self.rate(d, o) for d, o in zip(shape.depth, shape.order, strict=True)]
        paths = [1.0]
        for i, parent in enumerate(tree.parent[1:], 1):
            paths.append(0.0 if i in tree.probes else paths[parent] * confidence[i])
        return paths


@dataclass
class OpenDraft:
    """A draft that is still compared with the emitted tokens, whether it was verified or not.

    node: the last node that agrees with them.
    """

    tree: DraftTree
    node: int = 0

    def follow(self, tokens: Sequence[int], rates: AcceptanceRates) -> bool:
        """Compare with the next tokens; true once the draft has come to its end or to a wrong node."""
        shape = self.tree.shape
        for token in tokens:
            right = self.tree.child(self.node, token)
            for child in shape.children[self.node]:
                if child not in self.tree.probes:
                    rates.add(shape.depth[child], shape.order[child], child == right)
            if right is None:
                return True
            self.node = right
        return not shape.children[self.node]


@dataclass
class RowAcceptance:
    """A row's acceptance rates, and its drafts that are still compared with its text.

    length: of `row.tokens` before the pass under way.
    """

    row: Row
    rates: AcceptanceRates
    drafts: list[OpenDraft] = field(default_factory=list)
    length: int = 0

    def drafted(self, tree: DraftTree) -> None:
        """A draft of the pass under way; one that has its drafter's confidence needs no rates."""
        if len(tree) > 1 and tree.confidence is None:
            self.drafts.append(OpenDraft(tree))

    def observe(self) -> None:
        """The tokens that the pass gave."""
        if self.drafts:
            tokens = self.row.tokens[self.length :]
            self.drafts = [draft for draft in self.drafts if not draft.follow(tokens, self.rates)]


@dataclass
class DrafterAcceptance:
    """Acceptance of a drafter over its rows: what a new row begins with, and what expectations have come to.

    first, later: rates of a new row; see `AcceptanceRates`.
    """

    memory: float
    first: float
    later: float
    _accepted: float = 0.0  # nodes verified lately
    _expected: float = 0.0  # of them, by the rates at the time

    def begun(self, row: Row) -> RowAcceptance:
        return RowAcceptance(row, AcceptanceRates(self.memory, self.first, self.later))

    def verified(self, expected: float, emitted: int, rows: int) -> None:
        """A pass from which so many accepted nodes were expected emitted so many tokens, each row's bonus included."""
        self._accepted = KEPT * self._accepted + emitted - rows
        self._expected = KEPT * self._expected + expected

    @property
    def correction(self) -> float:
        """What an expected number of nodes is to be multiplied by."""
        return (self._accepted + DOUBT) / (self._expected + DOUBT)

    def ended(self, rates: AcceptanceRates) -> None:
        """New rows begin with what rows that ended have come to, the latest counting half."""
        self.first = (self.first + rates.rate(1, 0)) / 2
        self.later = (self.later + rates.rate(2, 0)) / 2
