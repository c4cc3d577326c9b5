"""Merging several draft trees into one: compiled (`_trees.c`), or here in Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from truedraft.stores._native import trees as compiled
from truedraft.tree import DraftTree

TREES = 31  # trees that the compiled form merges, at most
Tree = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], frozenset[int]]  # tokens, parents, confidence, probes
Joined = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], list[int], int]  # ..., owners, first probe
Joining = Callable[[list[Tree], int, list[float]], Joined]


class Union(NamedTuple):
    """Several trees as one.

    owners: for each node a bit mask of the trees that contain it.
    """

    tree: DraftTree
    owners: list[int]

    def alone(self, emitted: Sequence[int], verified: int) -> tuple[list[int], list[int]]:
        """For each tree, counts of its own nodes among the first `verified`: those emitted, and all."""
        native, tree = compiled(), self.tree
        if native is not None and self.owners[0].bit_length() <= TREES:
            found: tuple[list[int], list[int]] = native.alone(
                self.owners, tree.tokens, tree.parent, tree.probes, list(emitted), verified
            )
            return found
        trees = self.owners[0].bit_length()
        right, made = [0] * trees, [0] * trees
        for owner in self.owners[1 : 1 + verified]:
            if not owner & (owner - 1):
                made[owner.bit_length() - 1] += 1
        for node in followed(self.tree, emitted):
            owner = self.owners[node]
            if node <= verified and not owner & (owner - 1):
                right[owner.bit_length() - 1] += 1
        return right, made


def followed(tree: DraftTree, emitted: Sequence[int]) -> list[int]:
    """The nodes of a tree along the emitted tokens, from the first below the root on."""
    reached: list[int] = []
    node = 0
    for token in emitted:
        if (child := tree.child(node, token)) is None:
            break
        reached.append(child)
        node = child
    return reached


def union(trees: Sequence[DraftTree], budget: int, weights: Sequence[float] | None = None) -> Union:
    """One tree of several with the same root: its `budget` likeliest nodes, in that order, and all probes below them.

    Siblings exclude each other: their confidence is adjusted to sum to 1 at most. A chain among empty drafts remains as
    it is.

    trees: with confidence, and certain.
    weights: factors of each tree's nodes in that order; all the same by default.
    """
    drafted = [k for k, tree in enumerate(trees) if len(tree.tokens) > 1]
    if len(drafted) < 2 and weights is None:
        only = drafted[0] if drafted else 0
        chain = trees[only]
        if chain.is_chain and not chain.probes:
            kept = chain.cut(1 + budget)
            return Union(kept, [(1 << len(trees)) - 1, *[1 << only] * (len(kept.tokens) - 1)])
    embedded: list[tuple[int, Tensor]] = []
    given = [_given(tree, embedded) for tree in trees]
    native = compiled() if len(trees) <= TREES else None
    join: Joining = native.union if native is not None else _joined
    tokens, parent, confidence, owners, first_probe = join(given, budget, list(weights or [1.0] * len(trees)))
    whole = DraftTree(tokens, parent, probes=frozenset(range(first_probe, len(tokens))), confidence=confidence)
    return Union(_restored(whole, embedded) if embedded else whole, owners)


def _given(tree: DraftTree, embedded: list[tuple[int, Tensor]]) -> Tree:
    """A tree to be joined. Probes that are no tokens get negative ones on the way, ~i of the i-th of `embedded`."""
    assert tree.confidence is not None
    tokens = list(tree.tokens) if tree.embeds else tree.tokens
    for node, vector in tree.embeds.items():
        tokens[node] = ~len(embedded)  # type: ignore[index]
        embedded.append((tree.tokens[node], vector))
    return tuple(tokens), tree.parent, tree.confidence, tree.probes


def _restored(tree: DraftTree, embedded: Sequence[tuple[int, Tensor]]) -> DraftTree:
    found = {node: embedded[~token] for node, token in enumerate(tree.tokens) if token < 0}
    tokens = (found[node][0] if node in found else token for node, token in enumerate(tree.tokens))
    return replace(tree, tokens=tuple(tokens), embeds={node: vector for node, (_, vector) in found.items()})


def _joined(trees: list[Tree], budget: int, weights: list[float]) -> Joined:
    tokens, parents, confidence = [trees[0][0][0]], [-1], [1.0]
    weight, owners = [1.0], [(1 << len(trees)) - 1]
    probed: set[int] = set()
    nodes_by_token: dict[tuple[int, int], int] = {}
    for k, ((token_of, parent_of, confidence_of, probes), factor) in enumerate(zip(trees, weights, strict=True)):
        at = [0]
        for i in range(1, len(token_of)):
            parent, token, new = at[parent_of[i]], token_of[i], len(tokens)
            node = new if i in probes else nodes_by_token.setdefault((parent, token), new)
            if i in probes:
                probed.add(node)
            if node == new:
                tokens.append(token)
                parents.append(parent)
                confidence.append(confidence_of[i])
                weight.append(factor)
                owners.append(0)
            confidence[node] = max(confidence[node], confidence_of[i])
            weight[node] = max(weight[node], factor)
            owners[node] |= 1 << k
            at.append(node)
    _limit_siblings(parents, confidence, owners, probed)
    values = [1.0]
    for parent, own in zip(parents[1:], confidence[1:], strict=True):
        values.append(values[parent] * own)
    ranks = [value * factor for value, factor in zip(values, weight, strict=True)]
    kept = [i for i in range(1, len(tokens)) if i not in probed]
    kept.sort(key=ranks.__getitem__, reverse=True)
    nodes = [0, *kept[:budget]]
    drafted, place = len(nodes), {node: i for i, node in enumerate(nodes)}
    for probe in sorted(probed):
        if parents[probe] in place:
            place[probe] = len(nodes)
            nodes.append(probe)
    return (
        tuple([tokens[i] for i in nodes]),
        (-1, *[place[parents[i]] for i in nodes[1:]]),
        tuple([confidence[i] for i in nodes]),
        [owners[i] for i in nodes],
        drafted,
    )


def _limit_siblings(
    parents: Sequence[int], confidence: list[float], owners: Sequence[int], probes: Collection[int]
) -> None:
    """At most one child of a node is accepted: likelier siblings reduce the confidence of a child.

    Trees are assumed to err independently; the confidence of siblings of one tree is consistent already.
    """
    children: dict[int, list[int]] = {}
    for i in range(1, len(parents)):
        if i not in probes:
            children.setdefault(parents[i], []).append(i)
    for family in children.values():
        family.sort(key=lambda i: (-confidence[i], i))
        before, left = [confidence[i] for i in family], 1.0
        for k, i in enumerate(family):
            own = sum(before[j] for j in range(k) if owners[family[j]] & owners[i])
            confidence[i] = min(confidence[i] * left / max(1 - own, left), left) if left else 0.0
            left -= confidence[i]
