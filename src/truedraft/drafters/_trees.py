"""Shapes of drafts: chains and trees from what was looked up, and several trees made one."""

from __future__ import annotations

from collections.abc import Sequence

from truedraft.stores.automaton import Grown
from truedraft.tree import DraftTree

LATER = 0.85  # chance given to a deeper node where its drafter does not say
KEEPS = [(n + 0.5) / (n + 3) for n in range(65)]  # a match of n tokens goes on: a first guess, set right by `Trust`


def copied(root: int, tokens: Sequence[int], found: int) -> DraftTree:
    """A chain copied from where the last `found` tokens stood: the longer the match, the likelier it goes on."""
    return DraftTree.chain(root, tokens, [KEEPS[min(found + i, len(KEEPS) - 1)] for i in range(len(tokens))])


def counted(root: int, grown: Grown, count: int, found: int) -> DraftTree:
    """A tree of what followed the last `found` tokens, which stood there `count` times, as often as each did."""
    depth, hopes = [0], [1.0]
    counts = (count, *grown.counts)
    keeps = [*KEEPS[min(found, len(KEEPS) - 1) :], *[KEEPS[-1]] * len(counts)]
    for parent, times in zip(grown.parents, grown.counts, strict=True):
        level, of = depth[parent + 1], counts[parent + 1]
        depth.append(level + 1)
        hopes.append(times / of * keeps[level] if times < of else keeps[level])
    return DraftTree((root, *grown.tokens), (-1, *[p + 1 for p in grown.parents]), hopes=tuple(hopes))


def values_of(tree: DraftTree) -> list[float]:
    """The chance of every node that all of its path is right."""
    assert tree.hopes is not None
    values = [1.0]
    for parent, hope in zip(tree.parent[1:], tree.hopes[1:], strict=True):
        values.append(values[parent] * hope)
    return values


def placed(tree: DraftTree, hope: float) -> DraftTree:
    """A draft whose drafter does not say what it hopes of each node, with a guess from its place."""
    shape = tree.shape
    guesses = [(hope if d == 1 else LATER) * 0.5**o for d, o in zip(shape.depth, shape.order, strict=True)]
    return DraftTree(tree.tokens, tree.parent, probes=tree.probes, hopes=(1.0, *guesses[1:]))


def reach(tree: DraftTree, said: Sequence[int]) -> int:
    """How many of the tokens that were said a draft had right, from the first on."""
    node, depth = 0, 0
    for token in said:
        node = next((i for i in range(node + 1, len(tree)) if tree.parent[i] == node and tree.tokens[i] == token), 0)
        if not node:
            break
        depth += 1
    return depth


def likelier(tree: DraftTree, least: float) -> DraftTree:
    """The nodes whose paths are right with at least this chance, and the probes."""
    values = values_of(tree)
    if min(values) >= least:
        return tree
    return tree.kept([i for i, value in enumerate(values) if value >= least or i in tree.probes])


def union(trees: Sequence[DraftTree], budget: int, weights: Sequence[float] | None = None) -> DraftTree:
    """One tree of several with the same root: its `budget` likeliest nodes, in that order, and all probes.

    weights: of each tree's nodes in that order; all the same by default.
    """
    tokens, parents, hopes, weight = [trees[0].tokens[0]], [-1], [1.0], [1.0]
    probes: set[int] = set()
    known: dict[tuple[int, int], int] = {}
    for tree, heavy in zip(trees, weights or [1.0] * len(trees), strict=True):
        assert tree.hopes is not None
        at = [0]
        for i, (token, parent, hope) in enumerate(
            zip(tree.tokens[1:], tree.parent[1:], tree.hopes[1:], strict=True), 1
        ):
            new = len(tokens)
            if i in tree.probes:
                node = new
                probes.add(node)
            else:
                node = known.setdefault((at[parent], token), new)
            if node == new:
                tokens.append(token)
                parents.append(at[parent])
                hopes.append(hope)
                weight.append(heavy)
            else:
                hopes[node] = hope if hope > hopes[node] else hopes[node]
                weight[node] = heavy if heavy > weight[node] else weight[node]
            at.append(node)
    values = [1.0]
    for parent, hope in zip(parents[1:], hopes[1:], strict=True):
        values.append(values[parent] * hope)
    ranks = [-value * heavy for value, heavy in zip(values, weight, strict=True)]
    kept = sorted((i for i in range(1, len(tokens)) if i not in probes), key=ranks.__getitem__)[:budget]
    place = {node: i for i, node in enumerate([0, *kept])}
    for probe in sorted(probes):
        if parents[probe] in place:
            place[probe] = len(place)
    nodes = list(place)
    return DraftTree(
        tuple([tokens[i] for i in nodes]),
        (-1, *[place[parents[i]] for i in nodes[1:]]),
        probes=frozenset(place[i] for i in probes if i in place),
        hopes=tuple([hopes[i] for i in nodes]),
    )


def grafted(tree: DraftTree, node: int, branch: DraftTree) -> DraftTree:
    """A tree with another's nodes below one of its own; the other's root is that node."""
    assert tree.hopes is not None
    n = len(tree)
    hopes = branch.hopes if branch.hopes is not None else placed(branch, LATER).hopes
    assert hopes is not None
    return DraftTree(
        (*tree.tokens, *branch.tokens[1:]),
        (*tree.parent, *(node if p == 0 else p + n - 1 for p in branch.parent[1:])),
        probes=tree.probes | {i + n - 1 for i in branch.probes},
        hopes=(*tree.hopes, *hopes[1:]),
    )
