"""Acceptance rates of drafted tokens, by row, estimated by comparing its drafts with its emitted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.tree import DraftTree, Row

DOUBT = (
    4.0  # weight, in nodes, of the prior that expectations are right; those of drafts chosen as best tend to be high
)
KEPT = 0.97  # weight that verified nodes keep at each later pass


@dataclass
class AcceptanceRates:
    """Acceptance rates of first, second, ... children of accepted nodes, by depth; recent observations weigh most.

    Sequoia's positional acceptance (arXiv 2402.12374), estimated from one row while it is decoded. A rate is
    conditional on the parent being accepted.

    memory: weight that an observation keeps at each later one.
    first, later: prior rates of first children of the root and of deeper nodes; halved for each next sibling.
    """

    memory: float
    first: float
    later: float
    _seen: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)  # (accepted, tried)

    def add(self, depth: int, order: int, accepted: bool) -> None:
        """Record a child of an accepted node: its `order` among siblings from 0, and its `depth` below the root."""
        for key in ((depth, order), (0, order)) if depth > 1 else ((depth, order),):
            before, tried = self._seen.get(key, (0.0, 0.0))
            self._seen[key] = before * self.memory + accepted, tried * self.memory + 1

    def fade(self, depth: int) -> None:
        """Nothing was observed below a depth, though all above was accepted: what was observed there earlier loses
        weight, so that short drafts, which show nothing of longer ones, do not keep the rates of these low."""
        for key, (accepted, tried) in self._seen.items():
            if key[0] > depth or (key[0] == 0 and depth == 1):
                self._seen[key] = accepted * self.memory, tried * self.memory

    def rate(self, depth: int, order: int) -> float:
        """The rate of such children; below the first level the rate over all depths is the prior at each depth."""
        rate = (self.later if depth > 1 else self.first) * 0.5**order
        for key in ((0, order), (depth, order)) if depth > 1 else ((depth, order),):
            accepted, tried = self._seen.get(key, (0.0, 0.0))
            rate = (accepted + rate) / (tried + 1)
        return rate

    def confidences(self, tree: DraftTree) -> tuple[float, ...]:
        """Of each node the probability that it is accepted if its parent is: the tree's, where it has any, else the
        rates."""
        if tree.confidence is not None:
            return tree.confidence
        return tuple([self.rate(d, o) for d, o in zip(tree.shape.depth, tree.shape.order, strict=True)])


@dataclass
class OpenDraft:
    """A draft that is still being compared with the emitted tokens, whether it was verified or not.

    node: the deepest node that agrees with them.
    """

    tree: DraftTree
    node: int = 0

    def follow(self, tokens: Sequence[int], rates: AcceptanceRates) -> bool:
        """Compare with the next tokens; true once the draft ends or is wrong."""
        shape = self.tree.shape
        for token in tokens:
            right = self.tree.child(self.node, token)
            for child in shape.children[self.node]:
                if child not in self.tree.probes:
                    rates.add(shape.depth[child], shape.order[child], child == right)
            if right is None:
                return True
            self.node = right
        if ended := not shape.children[self.node]:
            rates.fade(shape.depth[self.node])
        return ended


@dataclass
class RowAcceptance:
    """A row's acceptance rates, and its drafts that are still compared with its tokens.

    length: length of `row.tokens` before the current pass.
    """

    row: Row
    rates: AcceptanceRates
    drafts: list[OpenDraft] = field(default_factory=list)
    length: int = 0

    @property
    def resumes(self) -> bool:
        """Whether it has come to something to draft; see `Drafter.resumes`."""
        return self.row.request.drafter.resumes(self.row)

    def drafted(self, tree: DraftTree) -> None:
        """Add a draft of the current pass, unless it has confidences, so that no rates are needed."""
        if len(tree) > 1 and tree.confidence is None:
            self.drafts.append(OpenDraft(tree))

    def observe(self) -> None:
        """Compare the drafts with the tokens that the pass emitted."""
        if self.drafts:
            tokens = self.row.tokens[self.length :]
            self.drafts = [draft for draft in self.drafts if not draft.follow(tokens, self.rates)]


@dataclass
class DrafterAcceptance:
    """Acceptance of a drafter over all of its rows: the priors of new rows, and a correction of expectations.

    first, later: prior rates of a new row; see `AcceptanceRates`.
    """

    memory: float
    first: float
    later: float
    _accepted: float = 0.0  # decayed number of accepted nodes
    _expected: float = 0.0  # decayed number that was expected

    def begun(self, row: Row) -> RowAcceptance:
        return RowAcceptance(row, AcceptanceRates(self.memory, self.first, self.later))

    def verified(self, expected: float, emitted: int, rows: int) -> None:
        """Record a pass: accepted nodes expected, tokens emitted (one bonus per row included) and rows."""
        self._accepted = KEPT * self._accepted + emitted - rows
        self._expected = KEPT * self._expected + expected

    @property
    def correction(self) -> float:
        """Factor by which an expected number of accepted nodes is multiplied; 1 at most, since the luck of a long draft
        says nothing of the next ones."""
        return min((self._accepted + DOUBT) / (self._expected + DOUBT), 1.0)

    def ended(self, rates: AcceptanceRates) -> None:
        """Update the priors of new rows by those of a row that ended, with weight one half."""
        self.first = (self.first + rates.rate(1, 0)) / 2
        self.later = (self.later + rates.rate(2, 0)) / 2
