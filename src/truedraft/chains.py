"""Drafts reduced to chains, for targets that score no branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from truedraft.tree import DraftTree


def chained(tree: DraftTree) -> DraftTree:
    """A draft with one child per node.

    Of drawn children the first is kept, or the last where only that is drawn: whatever the tokens, so that every rule
    keeps its law. Of certain ones that with the best path is kept, of the most tokens expected by confidence; without
    confidence the first.

    Raises:
        ValueError: the draft has probes, which are read beside it.
    """
    if tree.probes:
        raise ValueError("the draft has probes, and this model scores single chains only: give another drafter")
    children = tree.shape.children
    if max(map(len, children)) < 2:
        return tree
    choose = _drawn(tree) if tree.dist is not None else _best(tree)
    nodes = [0]
    while below := children[nodes[-1]]:
        nodes.append(choose(below))
    chain = tree.subtree(nodes)
    return chain if tree.dist is None else chain.replaced(draws="one")


def _drawn(tree: DraftTree) -> Callable[[Sequence[int]], int]:
    place = -1 if tree.draws == "last" else 0
    return lambda below: below[place]


def _best(tree: DraftTree) -> Callable[[Sequence[int]], int]:
    if tree.confidence is None:
        return lambda below: below[0]
    values = list(tree.confidence)  # tokens expected from a node on, if its parent is right
    for node, below in reversed(list(enumerate(tree.shape.children))):
        values[node] *= 1 + max((values[child] for child in below), default=0.0)
    return lambda below: max(below, key=values.__getitem__)
