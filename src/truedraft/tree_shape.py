"""What the parents of a draft tree alone determine: depths, children, the nodes that each node attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TreeShape:
    """What follows from the parents of a tree alone; computed once per distinct shape.

    depth: (n,) 0 for the root.
    run: (n,) length of the longest 0, 1, 2, ... that a node's path from the root begins with.
    extra, extra_depth, extra_from: the rest of the paths, one after another, with the depths of these nodes; that of
        node i is `extra[extra_from[i] : extra_from[i + 1]]`.
    height: the largest depth.
    """

    parent: tuple[int, ...]
    depth: tuple[int, ...]
    run: tuple[int, ...]
    extra: tuple[int, ...]
    extra_depth: tuple[int, ...]
    extra_from: tuple[int, ...]
    height: int

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """(n,) indices of each node's children, in order."""
        children: list[list[int]] = [[] for _ in self.parent]
        for i, p in enumerate(self.parent[1:], 1):
            children[p].append(i)
        return tuple(map(tuple, children))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """(n,) index of each node among its siblings."""
        order = [0] * len(self.parent)
        for siblings in self.children:
            for place, node in enumerate(siblings):
                order[node] = place
        return tuple(order)

    @cached_property
    def mask(self) -> Tensor:
        """(n, n) bool: mask[i, j] is True where j is i or an ancestor of i."""
        mask = torch.eye(len(self.parent), dtype=torch.bool)
        for i in range(1, len(self.parent)):
            mask[i] |= mask[self.parent[i]]
        return mask

    def grown(self, parents: Sequence[int]) -> TreeShape:
        """The shape with further nodes, which have these parents."""
        depth, run, extra, extra_from = [*self.depth], [*self.run], [*self.extra], [*self.extra_from]
        for i, p in enumerate(parents, len(depth)):
            depth.append(depth[p] + 1)
            above = extra[extra_from[p] : extra_from[p + 1]]
            if not above and run[p] == i:
                run.append(i + 1)
            else:
                run.append(run[p])
                extra += above
                extra.append(i)
            extra_from.append(len(extra))
        further = [depth[i] for i in extra[len(self.extra) :]]
        return TreeShape(
            (*self.parent, *parents), tuple(depth), tuple(run), tuple(extra), (*self.extra_depth, *further),
            tuple(extra_from), max(self.height, *depth[len(self.depth) :], 0),
        )  # fmt: skip


ROOT = TreeShape(parent=(-1,), depth=(0,), run=(1,), extra=(), extra_depth=(), extra_from=(0, 0), height=0)


@lru_cache(maxsize=4096)
def shape_of(parent: tuple[int, ...]) -> TreeShape:
    """The shape of the tree with these parents."""
    return ROOT.grown(parent[1:])


@lru_cache(maxsize=1024)
def chain_parents(n: int) -> tuple[int, ...]:
    """The parents of a chain of `n` nodes."""
    return tuple(range(-1, n - 1))


def entries_of(values: tuple[T, ...], nodes: Sequence[int]) -> tuple[T, ...]:
    """The values of these nodes: given as a range they are the first ones, which keep their indices."""
    return values[: len(nodes)] if isinstance(nodes, range) else tuple(values[i] for i in nodes)


def parents_of(parent: tuple[int, ...], nodes: Sequence[int]) -> tuple[int, ...]:
    """The parents of these nodes, as indices among them; a range as in `entries_of`."""
    if isinstance(nodes, range):
        return parent[: len(nodes)]
    new = {old: i for i, old in enumerate(nodes)}
    return tuple(new.get(parent[i], -1) for i in nodes)


def members_of(members: frozenset[int], nodes: Sequence[int]) -> frozenset[int]:
    """The indices among these nodes of those that are members."""
    return frozenset(i for i, old in enumerate(nodes) if old in members)


def keyed_of(values: dict[int, T], nodes: Sequence[int]) -> dict[int, T]:
    """The values of those of these nodes that have one, by their indices among them."""
    return {i: values[old] for i, old in enumerate(nodes) if old in values}
