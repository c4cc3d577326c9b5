"""What the parents of a draft tree alone determine: depths, children, the nodes that each node attends to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor


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


@lru_cache(maxsize=4096)
def shape_of(parent: tuple[int, ...]) -> TreeShape:
    """The shape of the tree with these parents."""
    n = len(parent)
    depth, run = [0] * n, [1] * n
    extras: list[tuple[int, ...]] = [()] * n
    for i in range(1, n):
        p = parent[i]
        depth[i] = depth[p] + 1
        if not extras[p] and run[p] == i:
            run[i] = i + 1
        else:
            run[i], extras[i] = run[p], (*extras[p], i)
    extra = tuple(chain.from_iterable(extras))
    return TreeShape(
        parent, tuple(depth), tuple(run), extra, tuple([depth[i] for i in extra]),
        tuple(accumulate(map(len, extras), initial=0)), max(depth),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def chain_parents(n: int) -> tuple[int, ...]:
    """The parents of a chain of `n` nodes."""
    return tuple(range(-1, n - 1))
