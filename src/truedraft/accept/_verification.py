"""The verification of a pass: what rules read of it, and the emission of what they accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from truedraft.chance import Chance
from truedraft.errors import Broken
from truedraft.sampling import Laws
from truedraft.stopping import Stops
from truedraft.stores.ranks import Ranks
from truedraft.tree import Accepted, DraftTree, Draws, Row, Scores

Verdict = tuple[Sequence[int], int]  # the accepted path, from the root on, and the token that follows it


@dataclass
class Candidates:
    """The children of a node of a draft, probes excluded.

    tokens: their token ids, in the order in which they were chosen or drawn.
    draws: how they were chosen; see `Draws`.
    dist: (V,) distribution that the drawn children were drawn from; None where all are certain.
    hidden: layer -> (H,) hidden state at the node, for tapped layers; None where nothing is tapped.
    """

    tokens: tuple[int, ...]
    draws: Draws = "certain"
    dist: Tensor | None = None
    hidden: Callable[[int], Tensor] | None = None

    @property
    def fixed(self) -> int:
        """Number of certain children; these come first."""
        if self.dist is None:
            return len(self.tokens)
        return max(len(self.tokens) - 1, 0) if self.draws == "last" else 0


# (scores (k, V), the candidates, rows, chance) -> a token for each of k rows, -1 where its scores are NaN
Choose = Callable[[Tensor, Sequence[Candidates], Sequence[Row], Chance], list[int]]


class TargetProbs:
    """The target's next-token distributions at the nodes of one row's draft, computed on access: `probs[node]`, (V,).

    Each is that after all logits processors, applied to the node's own prefix: the row's tokens and the drafted ones.

    logits: (nodes, V) before logits processors, probes included.
    hidden: (node, layer) -> (H,) hidden state of a tapped layer; None where nothing is tapped.
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
        """(k, V) scores at k nodes after all logits processors; `of` is their softmax."""
        drafts = [[self.tree.tokens[i] for i in self.tree.path(node)[1:]] for node in nodes]
        return self._laws.of_nodes(self.row, drafts, self.logits[list(nodes)])


@dataclass(eq=False, slots=True)
class Verification:
    """One pass over the rows of one request, given to `Rule.verify` before any of its tokens are emitted.

    Its methods emit what a rule accepts: they append tokens to the rows, apply the stopping criteria after each, and
    return one `Accepted` per row. `emitted` does so for whole paths, `walked` node by node, `followed` for tokens given
    at all nodes.

    Args:
        rows, trees, scores: the rows, one draft for each, and the pass over these.
        laws, stops, chance: logits processors, stopping criteria and source of noise of the request.
        pad: the token that ended rows emit in lockstep.
        tokens: the rule's token at every node, where it has decided all nodes at once; else None.
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
        """The target's distributions for the row at this index."""
        logits = self.scores.logits[place, : len(self.trees[place])]
        return TargetProbs(self.rows[place], self.trees[place], logits, self.laws, self._states(place))

    def emitted(self, verdict: Callable[[int], Verdict]) -> list[Accepted]:
        """Emit the tokens of accepted paths and the tokens that follow, up to where plain decoding would have ended.

        verdict: index of a row -> its accepted path and token; not called for rows that have ended and emit padding.
        """
        if not self.stops.lockstep:
            return [self._emit_row(i, *verdict(i)) for i in range(len(self.rows))]
        waits = [row.ended and self.stops.pads for row in self.rows]
        return self._emit_lockstep([self._padded(i, [0]) if wait else verdict(i) for i, wait in enumerate(waits)])

    def followed(self, tokens: Sequence[Sequence[int]]) -> list[Accepted]:
        """The same for paths along which each drafted token is the one of `tokens` at the node before it."""
        if isinstance(tokens, Ranks):
            return self.emitted(tokens.paths(self.trees).__getitem__)
        return self.emitted(lambda i: agreed(self.trees[i], tokens[i]))

    def _padded(self, place: int, path: Sequence[int]) -> Verdict:
        """The path and token of an ended row, which emits padding as far as that was drafted."""
        tree, path = self.trees[place], list(path)
        while (below := tree.child(path[-1], self.pad)) is not None:
            path.append(below)
        return path, self.pad

    def _emit_row(self, place: int, path: Sequence[int], token: int) -> Accepted:
        """Emit for one row, up to where it ends."""
        row, drafted, stops, kept = self.rows[place], self.trees[place].tokens, self.stops, 0
        _check(token)
        if stops.plain and not self.laws.keeps:
            adjacent = path[-1] == len(path) - 1  # the tree's first nodes, as in every chain
            accepted = drafted[1 : len(path)] if adjacent else [drafted[node] for node in path[1:]]
            kept = stops.emit(row, [*accepted, token])
            return Accepted(tuple(path[:kept]), row.tokens[-1], row.ended)
        for kept, node in enumerate(path, 1):
            if self.laws.keeps:
                self.laws((row,), self.scores.logits[place, node][None])
            row.tokens.append(token if kept == len(path) else drafted[path[kept]])
            stops((row,))
            if row.ended:
                break
        return Accepted(tuple(path[:kept]), row.tokens[-1], row.ended)

    def _emit_lockstep(self, verdicts: list[Verdict]) -> list[Accepted]:
        """Emit for all rows, one token each at a time, until the first row has no more or all have ended."""
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
        """Choose at each row's root, then at the child with the chosen token for as long as there is one; emit all.

        Only nodes on accepted paths are evaluated, each after the tokens before it were emitted, so processors and
        criteria are called with the prefixes of plain decoding.
        """
        rows, trees, stops = self.rows, self.trees, self.stops
        paths: list[list[int]] = [[0] for _ in rows]
        alive = list(range(len(rows)))
        while alive:
            current = [rows[i] for i in alive]
            nodes = [paths[i][-1] for i in alive]
            children = [self._candidates(i, node) for i, node in zip(alive, nodes, strict=True)]
            logits = torch.stack([self.scores.logits[i, node] for i, node in zip(alive, nodes, strict=True)])
            scores = self.laws(current, logits)
            tokens = choose(scores, children, current, self.chance)
            _check(min(tokens))
            for row, token in zip(current, tokens, strict=True):
                row.tokens.append(self.pad if row.ended and stops.pads else token)
            stops(current)
            below = [
                None if row.ended and not stops.lockstep else trees[i].child(node, row.tokens[-1])
                for row, i, node in zip(current, alive, nodes, strict=True)
            ]
            if stops.lockstep and (None in below or all(row.ended for row in current)):
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
        return self.scores.features(place, (node,), (layer,))[-1]


def candidates(tree: DraftTree, node: int, hidden: Callable[[int, int], Tensor] | None = None) -> Candidates:
    """The children of a node. hidden: (node, layer) -> (H,) hidden state, None where nothing is tapped."""
    children = [c for c in tree.shape.children[node] if c not in tree.probes]
    return Candidates(
        tuple(tree.tokens[c] for c in children),
        tree.draws,
        None if tree.dist is None else tree.dist[node],
        None if hidden is None else partial(hidden, node),
    )


def agreed(tree: DraftTree, tokens: Sequence[int]) -> Verdict:
    """The longest path along which each drafted token is the chosen one at its parent, and the token after it.

    tokens: (nodes,) the chosen next token at every node.
    """
    path, token = [0], tokens[0]
    while (below := tree.child(path[-1], token)) is not None:
        path.append(below)
        token = tokens[below]
    return path, token


def first_children(tree: DraftTree) -> list[int]:
    """The path from the root down to a leaf by first children, probes excluded."""
    nodes = [0]
    while below := [c for c in tree.shape.children[nodes[-1]] if c not in tree.probes]:
        nodes.append(below[0])
    return nodes


def _check(token: int) -> None:
    """Raises Broken for -1, the token of scores that are NaN."""
    if token < 0:
        raise Broken("the target's logits are NaN: check its weights and dtype (float16 overflows)")
