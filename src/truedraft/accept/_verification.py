"""A pass that is to be verified: what rules read of it, and how what they accept is emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from truedraft.chance import Chance
from truedraft.errors import Refused
from truedraft.sampling import Laws
from truedraft.stopping import Stops
from truedraft.tree import Accepted, DraftTree, Draws, Row, Scores

Verdict = tuple[Sequence[int], int]  # the accepted path, from the root on, and the token behind it


@dataclass
class Candidates:
    """What the draft offers below a node.

    tokens: the children's, in the order in which they came about.
    draws: how they did.
    dist: (V,) the law that those were drawn from that were drawn; None where none was.
    hidden: layer -> (H,) its output at the node, for rules that `need` it; None where nothing is tapped.
    """

    tokens: tuple[int, ...]
    draws: Draws = "certain"
    dist: Tensor | None = None
    hidden: Callable[[int], Tensor] | None = None

    @property
    def fixed(self) -> int:
        """How many of the first tokens are certain."""
        if self.dist is None:
            return len(self.tokens)
        return max(len(self.tokens) - 1, 0) if self.draws == "last" else 0


# (scores (k, V), the candidates, rows, chance) -> a token for each of k rows, -1 where its scores are NaN
Choose = Callable[[Tensor, Sequence[Candidates], Sequence[Row], Chance], list[int]]


class TargetProbs:
    """The target's next-token distributions at the nodes of one row's draft, computed when they are asked for.

    Each is that of the node's own prefix, after all logits processors: the row's tokens, then the drafted ones.
    `probs[node]` is (V,).

    logits: (nodes, V) raw, probes included.
    hidden: (node, layer) -> (H,) the output of a tapped layer at a node; None where nothing is tapped.
    """

    def __init__(
        self,
        row: Row,
        tree: DraftTree,
        logits: Tensor,
        laws: Laws,
        hidden: Callable[[int, int], Tensor] | None = None,
    ):
        self.row, self.tree, self.logits, self.hidden = row, tree, logits, hidden
        self._laws = laws

    def __getitem__(self, node: int) -> Tensor:
        return self.of([node])[0]

    def of(self, nodes: Sequence[int]) -> Tensor:
        """(k, V) probabilities at k nodes."""
        return self.scores(nodes).softmax(-1)

    def scores(self, nodes: Sequence[int]) -> Tensor:
        """(k, V) processed scores at k nodes, of which `of` takes the softmax."""
        drafts = [[self.tree.tokens[i] for i in self.tree.path(node)[1:]] for node in nodes]
        return self._laws.of_drafts([self.row] * len(drafts), drafts, self.logits[list(nodes)])


@dataclass(eq=False, slots=True)
class Verification:
    """One pass over drafts of the rows of one request, before anything of it is emitted.

    Args:
        rows, trees, scores: the rows, their drafts, and what the target made of these.
        laws, stops, chance: the request's processors, stopping criteria and noise.
        pad: the token of rows that have ended and go on in lockstep.
        tokens: the rule's token at every node, where it decided all nodes at once.
    """

    rows: Sequence[Row]
    trees: Sequence[DraftTree]
    scores: Scores
    laws: Laws
    stops: Stops
    chance: Chance
    pad: int
    tokens: Sequence[Sequence[int]] | None = None

    def probs(self, place: int) -> TargetProbs:
        """Those of one row."""
        logits = self.scores.logits[place, : len(self.trees[place])]
        return TargetProbs(self.rows[place], self.trees[place], logits, self.laws, self._states(place))

    def emitted(self, verdict: Callable[[int], Verdict]) -> list[Accepted]:
        """Rows emit the tokens of their paths and the one behind, as far as plain decoding would have come.

        verdict: a row's place -> its path and token; not asked of rows that go on with padding.
        """
        if not self.stops.lockstep:
            return [self._alone(i, *verdict(i)) for i in range(len(self.rows))]
        waits = [row.ended and self.stops.pads for row in self.rows]
        return self._together([self._padded(i, [0]) if wait else verdict(i) for i, wait in enumerate(waits)])

    def followed(self, tokens: Sequence[Sequence[int]]) -> list[Accepted]:
        """The same with paths as far as drafts agree with the token at every node."""
        return self.emitted(lambda i: agreed(self.trees[i], tokens[i]))

    def _padded(self, place: int, path: Sequence[int]) -> Verdict:
        """A row that has ended goes on with padding, as far as that was drafted."""
        tree, path = self.trees[place], list(path)
        while (below := tree.child(path[-1], self.pad)) is not None:
            path.append(below)
        return path, self.pad

    def _alone(self, place: int, path: Sequence[int], token: int) -> Accepted:
        """One row by itself, up to where it ends."""
        row, drafted, stops, kept = self.rows[place], self.trees[place].tokens, self.stops, 0
        _check(token)
        for kept, node in enumerate(path, 1):
            if self.laws.keeps:
                self.laws((row,), self.scores.logits[place, node][None])
            row.tokens.append(token if kept == len(path) else drafted[path[kept]])
            stops((row,))
            if row.ended:
                break
        return Accepted(tuple(path[:kept]), row.tokens[-1], row.ended)

    def _together(self, verdicts: list[Verdict]) -> list[Accepted]:
        """All rows in lockstep, up to where the first of them has nothing more to emit, or all have ended."""
        over, kept = False, 0
        _check(min(token for _, token in verdicts))
        while not over and kept < min(len(path) for path, _ in verdicts):
            if self.laws.keeps:
                at = [path[kept] for path, _ in verdicts]
                self.laws(self.rows, self.scores.logits[range(len(at)), at])
            kept += 1
            for row, tree, (path, token) in zip(self.rows, self.trees, verdicts, strict=True):
                row.tokens.append(token if kept == len(path) else tree.tokens[path[kept]])
            self.stops(self.rows)
            over = all(row.ended for row in self.rows)
            for i, (row, (path, _)) in enumerate(zip(self.rows, verdicts, strict=True)):
                if self.stops.pads and row.end == len(row.tokens) and kept < len(path):
                    verdicts[i] = self._padded(i, path[: kept + 1])
        return [
            Accepted(tuple(path[:kept]), row.tokens[-1], over)
            for row, (path, _) in zip(self.rows, verdicts, strict=True)
        ]

    def walked(self, choose: Choose) -> list[Accepted]:
        """Follow every row's tree from its root for as long as what is chosen was drafted; emit as it goes.

        Only nodes on accepted paths are ever judged, each after the tokens before it were emitted, so processors and
        criteria see the prefixes that plain decoding would show them.
        """
        rows, trees, stops = self.rows, self.trees, self.stops
        paths: list[list[int]] = [[0] for _ in rows]
        alive = list(range(len(rows)))
        while alive:
            standing = [rows[i] for i in alive]
            nodes = [paths[i][-1] for i in alive]
            offered = [self._candidates(i, node) for i, node in zip(alive, nodes, strict=True)]
            scores = self.laws(standing, self.scores.logits[alive, nodes])
            tokens = choose(scores, offered, standing, self.chance)
            _check(min(tokens))
            for row, token in zip(standing, tokens, strict=True):
                row.tokens.append(self.pad if row.ended and stops.pads else token)
            stops(standing)
            below = [
                None if row.ended and not stops.lockstep else trees[i].child(node, row.tokens[-1])
                for row, i, node in zip(standing, alive, nodes, strict=True)
            ]
            if stops.lockstep and (None in below or all(row.ended for row in standing)):
                break
            alive = [i for i, child in zip(alive, below, strict=True) if child is not None]
            for i, child in zip(alive, filter(None, below), strict=True):
                paths[i].append(child)
        over = all(row.ended for row in rows)
        return [
            Accepted(tuple(path), row.tokens[-1], over if stops.lockstep else row.ended)
            for path, row in zip(paths, rows, strict=True)
        ]

    def _candidates(self, place: int, node: int) -> Candidates:
        return candidates(self.trees[place], node, self._states(place))

    def _states(self, place: int) -> Callable[[int, int], Tensor] | None:
        return partial(self._hidden, place) if self.scores.hidden else None

    def _hidden(self, place: int, node: int, layer: int) -> Tensor:
        return self.scores.hidden[layer][place][self.scores.context[place] + node]


def candidates(tree: DraftTree, node: int, hidden: Callable[[int, int], Tensor] | None = None) -> Candidates:
    """What hangs below a node. hidden: (node, layer) -> (H,) states, where any are tapped."""
    children = [c for c in tree.shape.children[node] if c not in tree.probes]
    return Candidates(
        tuple(tree.tokens[c] for c in children),
        tree.draws,
        None if tree.dist is None else tree.dist[node],
        None if hidden is None else partial(hidden, node),
    )


def agreed(tree: DraftTree, tokens: Sequence[int]) -> Verdict:
    """The path of drafted tokens that are those at the nodes above them, and the token at its end.

    tokens: at every node, the one that follows it.
    """
    path = [0]
    while (below := tree.child(path[-1], tokens[path[-1]])) is not None:
        path.append(below)
    return path, tokens[path[-1]]


def first_children(tree: DraftTree) -> list[int]:
    """The nodes from the root down the first children, probes left out."""
    nodes = [0]
    while below := [c for c in tree.shape.children[nodes[-1]] if c not in tree.probes]:
        nodes.append(below[0])
    return nodes


def _check(token: int) -> None:
    """Raises Refused for -1, which stands for a token of scores that are NaN."""
    if token < 0:
        raise Refused("the target's logits are NaN: check its weights and dtype (float16 overflows)")
