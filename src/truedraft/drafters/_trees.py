"""Shapes of drafts: chains and trees from what was looked up, and several trees made one."""

from __future__ import annotations

import heapq
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace

from truedraft.stores._cursor import SEPARATOR, Grown
from truedraft.stores._native import trees
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


def onward(root: int, source: Sequence[int], at: int, most: int, run: int, first: float | None = None) -> DraftTree:
    """A chain of what stands in a source from `at` on, not beyond a separator.

    run: tokens before it that agreed. first: the chance of its first token, where that is another.
    """
    tokens = source[at : at + most]
    tokens = tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens
    confidence = keeps(run, len(tokens))
    if first is not None:
        confidence[:1] = [first]
    return DraftTree.chain(root, tokens, confidence[: len(tokens)])


def counted(root: int, grown: Grown, count: int, found: int) -> DraftTree:
    """A tree of what followed the last `found` tokens, which stood there `count` times, as often as each did."""
    tree = counted_in_python if (native := trees()) is None else native.counted
    tokens, parents, confidence = tree(root, count, *grown, keeps(found, 1 + len(grown.tokens)))
    return DraftTree(tokens, parents, confidence=confidence)


def counted_in_python(
    root: int, count: int, tokens: list[int], parents: list[int], counts: list[int], sure: list[float]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """As in `_trees.c`.

    sure: how sure the nodes of each level are that the text goes on as one of the places did.
    """
    depth, times, confidence = [0], [count, *counts], [1.0]
    for parent, here in zip(parents, counts, strict=True):
        level, of = depth[parent + 1], times[parent + 1]
        depth.append(level + 1)
        confidence.append(sure[level] if here >= of else here / of * sure[level])
    return (root, *tokens), (-1, *(parent + 1 for parent in parents)), tuple(confidence)


def values_of(tree: DraftTree) -> list[float]:
    """The chance of every node that all of its path is right."""
    assert tree.confidence is not None
    values = [1.0]
    for parent, hope in zip(tree.parent[1:], tree.confidence[1:], strict=True):
        values.append(values[parent] * hope)
    return values


def placed(tree: DraftTree, hope: float) -> DraftTree:
    """A draft whose drafter states no confidence, with a guess from each place."""
    shape = tree.shape
    guesses = [(hope if d == 1 else LATER) * 0.5**o for d, o in zip(shape.depth, shape.order, strict=True)]
    return replace(tree, confidence=(1.0, *guesses[1:]))


def grafted(tree: DraftTree, node: int, branch: DraftTree) -> DraftTree:
    """A tree with another's nodes below one of its own; the other's root is that node."""
    assert tree.confidence is not None
    n = len(tree)
    confidence = branch.confidence if branch.confidence is not None else placed(branch, LATER).confidence
    assert confidence is not None
    return replace(
        tree,
        tokens=(*tree.tokens, *branch.tokens[1:]),
        parent=(*tree.parent, *(node if p == 0 else p + n - 1 for p in branch.parent[1:])),
        probes=tree.probes | {i + n - 1 for i in branch.probes},
        confidence=(*tree.confidence, *confidence[1:]),
        embeds=tree.embeds | {i + n - 1: vector for i, vector in branch.embeds.items()},
    )


def likeliest_paths(
    root: int, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], nodes: int, ends: frozenset[int]
) -> DraftTree:
    """The nodes whose paths are likeliest where places do not depend on each other; nothing below an end.

    tokens, chances: of each place, the likeliest first; of one a place, the tree is a chain.
    """
    said, parents, confidence = [root], [-1], [1.0]
    heap = [(-chances[0][0], 0, 0, 0, 1.0)]  # of a path, its last place, the rank there, the parent and its chance
    while heap and len(said) <= nodes:
        value, place, rank, parent, before = heapq.heappop(heap)
        if rank + 1 < len(tokens[place]):
            heapq.heappush(heap, (-before * chances[place][rank + 1], place, rank + 1, parent, before))
        if place + 1 < len(tokens) and tokens[place][rank] not in ends:
            heapq.heappush(heap, (value * chances[place + 1][0], place + 1, 0, len(said), -value))
        said.append(tokens[place][rank])
        parents.append(parent)
        confidence.append(chances[place][rank])
    return DraftTree(tuple(said), tuple(parents), confidence=tuple(confidence))
