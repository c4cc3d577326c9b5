"""Draft trees built from matches in a text, from counts and from per-position candidates; grafting of trees."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from itertools import accumulate, islice, takewhile

from truedraft.stores._cursor import SEPARATOR, Best, Cursor, Grown, Sizes
from truedraft.stores._native import drafts, trees
from truedraft.stores.automaton import Automaton, CompiledAutomaton, best_tree
from truedraft.tree import DraftTree, Row

LATER = 0.85  # confidence of a deeper node where its drafter gives none
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 45, 64)  # bins of match lengths
# How often a match of n tokens continues, in recorded answers of Llama-3 70B: a prior, calibrated online.
CONTINUED = [max(n**1.5 / (n**1.5 + 4.5), 0.05) for n in LENGTHS]
MATCH_CONFIDENCE = [CONTINUED[bisect(LENGTHS, n) - 1] for n in range(64)] + CONTINUED[-1:] * 1024
MATCH_CONFIDENCES = array("d", MATCH_CONFIDENCE)


def match_confidence(found: int, count: int) -> list[float]:
    """Confidences of `count` tokens copied after a match of `found` tokens; they rise as the match grows longer."""
    found = min(found, LENGTHS[-1])
    return MATCH_CONFIDENCE[found : found + count]


def copied_chain(root: int, tokens: Sequence[int], found: int) -> DraftTree:
    """A chain copied after a match of the last `found` tokens."""
    return DraftTree.chain(root, tokens, match_confidence(found, len(tokens)))


def copied_onward(
    root: int, source: Sequence[int], at: int, most: int, run: int, first: float | None = None
) -> DraftTree:
    """A chain copied from a source from index `at` on, up to a separator.

    run: length of the match before it. first: confidence of its first token, if not that of such a match.
    """
    tokens = source[at : at + most]
    tokens = tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens
    confidence = match_confidence(run, len(tokens))
    if first is not None:
        confidence[:1] = [first]
    return DraftTree.chain(root, tokens, confidence[: len(tokens)])


def frequency_tree(root: int, grown: Grown, count: int, found: int) -> DraftTree:
    """A tree of the continuations of `count` matches of `found` tokens, with confidences by frequency."""
    tree = counted_in_python if (native := trees()) is None else native.counted
    tokens, parents, confidence = tree(root, count, *grown, match_confidence(found, 1 + len(grown.tokens)))
    return DraftTree(tokens, parents, confidence=confidence)


def likeliest_continuations(
    root: int, sources: Sequence[tuple[Automaton, Cursor]], sizes: Sizes, longest: int
) -> DraftTree:
    """Of the trees of continuations of the last tokens in several texts the first with the most expected tokens; see
    `Automaton.best`.

    sources: each with the match of the last tokens; they are not changed. longest: tokens of a match that are used.
    """
    if (native := drafts()) is not None and all(isinstance(text, CompiledAutomaton) for text, _ in sources):
        given = [(text.address, addressof(cursor)) for text, cursor in sources]  # type: ignore[attr-defined]
        found = native.frequent(best_tree(), given, longest, root, *sizes, MATCH_CONFIDENCES)
        if found is None:
            return DraftTree.chain(root)
        tokens, parents, confidence = found
        return DraftTree(tokens, parents, confidence=confidence)
    best: Best | None = None
    for text, place in sources:
        cursor = place.copy()
        text.shorten(cursor, longest)
        best = text.best(cursor, sizes, best.expected if best is not None else 0.0) or best
    if best is None:
        return DraftTree.chain(root)
    return frequency_tree(root, best.grown, best.occurrences, best.length)


def counted_in_python(
    root: int, count: int, tokens: list[int], parents: list[int], counts: list[int], sure: list[float]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """As in `_trees.c`.

    sure: by level, the confidence that the text continues as one of the occurrences did.
    """
    depth, times, confidence = [0], [count, *counts], [1.0]
    for parent, here in zip(parents, counts, strict=True):
        level, total = depth[parent + 1], times[parent + 1]
        depth.append(level + 1)
        confidence.append(sure[level] if here >= total else here / total * sure[level])
    return (root, *tokens), (-1, *(parent + 1 for parent in parents)), tuple(confidence)


def values_of(tree: DraftTree) -> list[float]:
    """Path confidence of every node: the product of the confidences from the root to it."""
    assert tree.confidence is not None
    values = [1.0]
    for parent, confidence in zip(tree.parent[1:], tree.confidence[1:], strict=True):
        values.append(values[parent] * confidence)
    return values


def placed(tree: DraftTree, estimate: float) -> DraftTree:
    """A draft without confidence, with a default by depth and sibling order."""
    shape = tree.shape
    guesses = [(estimate if d == 1 else LATER) * 0.5**o for d, o in zip(shape.depth, shape.order, strict=True)]
    return tree.replaced(confidence=(1.0, *guesses[1:]))


def grafted(tree: DraftTree, node: int, branch: DraftTree) -> DraftTree:
    """A tree with `branch` below one of its nodes; the root of `branch` is that node."""
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
    """The nodes with the likeliest paths, positions taken as independent; nothing below an end token.

    tokens, chances: candidates and their probabilities per position, the likeliest first; one each gives a chain.
    """
    drafted, parents, confidence = [root], [-1], [1.0]
    heap = [(-chances[0][0], 0, 0, 0, 1.0)]  # -path probability, position, rank there, parent, parent's probability
    while heap and len(drafted) <= nodes:
        value, place, rank, parent, before = heapq.heappop(heap)
        if rank + 1 < len(tokens[place]):
            heapq.heappush(heap, (-before * chances[place][rank + 1], place, rank + 1, parent, before))
        if place + 1 < len(tokens) and tokens[place][rank] not in ends:
            heapq.heappush(heap, (value * chances[place + 1][0], place + 1, 0, len(drafted), -value))
        drafted.append(tokens[place][rank])
        parents.append(parent)
        confidence.append(chances[place][rank])
    return DraftTree(tuple(drafted), tuple(parents), confidence=tuple(confidence))


def likeliest_positions(
    root: int, candidates: Sequence[Sequence[tuple[int, float]]], nodes: int, ends: frozenset[int]
) -> DraftTree:
    """The same, of (token, probability) pairs by position, up to the first position without any."""
    found = list(takewhile(bool, candidates))
    if not found:
        return DraftTree.chain(root, (), ())
    tokens, chances = [[token for token, _ in some] for some in found], [[p for _, p in some] for some in found]
    return likeliest_paths(root, tokens, chances, nodes, ends)


def root_of(row: Row, after: Sequence[int]) -> int:
    """The root of a draft behind `after`, tokens that another drafter has drafted; without any, the pending token."""
    return after[-1] if after else row.tokens[-1]


def ranked(drafts: Sequence[tuple[DraftTree, tuple[float, ...]]]) -> tuple[list[float], list[int]]:
    """The nodes of several drafts by the probability that their paths are right: sums of it over the 0, 1, ... most
    probable of all, and the draft of each of these. A node counts as no more probable than those before it in its
    draft, so that of each draft the first nodes are taken; a probe as never right.

    drafts: each with the confidence of every node.
    """
    if (native := trees()) is not None:
        found: tuple[list[float], list[int]] = native.ranked([(t.parent, sure, t.probes) for t, sure in drafts])
        return found
    nodes = [
        (path, i)
        for i, (tree, sure) in enumerate(drafts)
        for path in islice(accumulate(path_probabilities(tree, sure), min), 1, None)
    ]
    nodes.sort(reverse=True)
    return list(accumulate([path for path, _ in nodes], initial=0.0)), [i for _, i in nodes]


def path_probabilities(tree: DraftTree, confidence: Sequence[float]) -> list[float]:
    """The probability of each node that its whole path is right; 1 for the root, 0 for probes."""
    paths = [1.0]
    for i, parent in enumerate(tree.parent[1:], 1):
        paths.append(0.0 if i in tree.probes else paths[parent] * confidence[i])
    return paths
