"""Shapes of drafts: chains and trees from what was looked up, and several trees made one."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

from truedraft.stores.automaton import Grown
from truedraft.tree import DraftTree

LATER = 0.85  # chance given to a deeper node where its drafter does not say
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 45, 64)  # of matches that are told apart
# A match of n tokens goes on, as often as in recorded answers of Llama-3 70B: a first guess, set right by `Trust`.
SURE = [max(n**1.5 / (n**1.5 + 4.5), 0.05) for n in LENGTHS]
KEEPS = [SURE[bisect(LENGTHS, n) - 1] for n in range(64)] + SURE[-1:] * 1024


def keeps(found: int, count: int) -> list[float]:
    """The chances of `count` tokens that follow a match of `found`: the longer, the likelier the next is right too."""
    found = min(found, LENGTHS[-1])
    return KEEPS[found : found + count]


def copied(root: int, tokens: Sequence[int], found: int) -> DraftTree:
    """A chain copied from where the last `found` tokens stood."""
    return DraftTree.chain(root, tokens, keeps(found, len(tokens)))


def counted(root: int, grown: Grown, count: int, found: int) -> DraftTree:
    """A tree of what followed the last `found` tokens, which stood there `count` times, as often as each did."""
    depth, hopes = [0], [1.0]
    counts = (count, *grown.counts)
    sure = keeps(found, len(counts))
    for parent, times in zip(grown.parents, grown.counts, strict=True):
        level, of = depth[parent + 1], counts[parent + 1]
        depth.append(level + 1)
        hopes.append(times / of * sure[level] if times < of else sure[level])
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


class Union(NamedTuple):
    """Several trees as one.

    owners: the trees that have each node, a bit for each.
    """

    tree: DraftTree
    owners: list[int]

    def alone(self, said: Sequence[int], verified: int) -> tuple[list[int], list[int]]:
        """Of the first `verified` nodes, those that only the first, second, ... tree had: right ones, and all."""
        trees = self.owners[0].bit_length()
        right, made = [0] * trees, [0] * trees
        for owner in self.owners[1 : 1 + verified]:
            if not owner & (owner - 1):
                made[owner.bit_length() - 1] += 1
        for node in followed(self.tree, said):
            owner = self.owners[node]
            if node <= verified and not owner & (owner - 1):
                right[owner.bit_length() - 1] += 1
        return right, made


def followed(tree: DraftTree, said: Sequence[int]) -> list[int]:
    """The nodes of a tree that are reached by what was said, from the first below the root on."""
    reached: list[int] = []
    node = 0
    for token in said:
        child = node
        for _ in range(tree.parent.count(node)):
            child = tree.parent.index(node, child + 1)
            if tree.tokens[child] == token and child not in tree.probes:
                reached.append(child)
                break
        else:
            break
        node = child
    return reached


def union(trees: Sequence[DraftTree], budget: int, weights: Sequence[float] | None = None) -> Union:
    """One tree of several with the same root: its `budget` likeliest nodes, in that order, and all probes.

    weights: of each tree's nodes in that order; all the same by default.
    """
    tokens, parents, hopes = [trees[0].tokens[0]], [-1], [1.0]
    weight, owners = [1.0], [(1 << len(trees)) - 1]
    probes: set[int] = set()
    known: dict[tuple[int, int], int] = {}
    for k, tree in enumerate(trees):
        if len(tree) == 1:
            continue
        assert tree.hopes is not None
        owner, heavy, at = 1 << k, 1.0 if weights is None else weights[k], [0]
        for i, token in enumerate(tree.tokens[1:], 1):
            parent, hope, new = at[tree.parent[i]], tree.hopes[i], len(tokens)
            if i in tree.probes:
                node = new
                probes.add(node)
            else:
                node = known.setdefault((parent, token), new)
            if node == new:
                tokens.append(token)
                parents.append(parent)
                hopes.append(hope)
                weight.append(heavy)
                owners.append(owner)
            else:
                owners[node] |= owner
                if hope > hopes[node]:
                    hopes[node] = hope
                if heavy > weight[node]:
                    weight[node] = heavy
            at.append(node)
    values = [1.0]
    for i in range(1, len(tokens)):
        values.append(values[parents[i]] * hopes[i])
    ranks = values if weights is None else [value * heavy for value, heavy in zip(values, weight, strict=True)]
    kept = [i for i in range(1, len(tokens)) if i not in probes]
    kept.sort(key=ranks.__getitem__, reverse=True)
    nodes = [0, *kept[:budget]]
    place = {node: i for i, node in enumerate(nodes)}
    for probe in sorted(probes):
        if parents[probe] in place:
            place[probe] = len(nodes)
            nodes.append(probe)
    tree = DraftTree(
        tuple([tokens[i] for i in nodes]),
        (-1, *[place[parents[i]] for i in nodes[1:]]),
        probes=frozenset([place[i] for i in probes if i in place]),
        hopes=tuple([hopes[i] for i in nodes]),
    )
    return Union(tree, [owners[i] for i in nodes])


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
