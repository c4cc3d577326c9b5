"""Compiled passes that go on with trees: nodes behind those that earlier passes wrote, and chains and trees of
likeliest tokens, of which one call makes the passes of all levels (`native/chains.inc`, `native/trees.inc`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from ctypes import Array, Structure
from itertools import accumulate, chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from truedraft.runtime._base import GreedyChain, GrownTree, Runner, TreeGrowth, TreeLimits
from truedraft.runtime.native import ChainArguments, Op, TreeArguments
from truedraft.runtime.nodes import Nodes
from truedraft.tree import DraftTree, Taps
from truedraft.views._base import WHOLE, Reduction


class FurtherPasses(ABC):
    """What further passes compute behind the nodes of a first one: the arguments of a function of the library, and the
    memory that these point to.

    function: its name.
    """

    function: ClassVar[str]

    @abstractmethod
    def arguments(self, logits: int) -> Structure:
        """logits: index of the buffer with these."""


class ChainBuffers(FurtherPasses):
    """Chains of likeliest tokens, which consider the same tokens."""

    function = "truedraft_chains"

    def __init__(self, chains: Sequence[GreedyChain]):
        count = len(chains)
        self._room = max(one.most for one in chains) or 1
        self._memory = {
            "most": array("q", [one.most for one in chains]), **_ends(chains),
            "tokens": zeros("q", count * self._room), "drafted": zeros("q", count),
        }  # fmt: skip
        self._chains = chains

    def arguments(self, logits: int) -> Structure:
        first = self._chains[0]
        return ChainArguments(
            chains=len(self._chains), logits=logits, room=self._room, least=first.least, **_columns(first.columns),
            **_pointers(self._memory),
        )  # fmt: skip

    def tokens(self) -> list[list[int]]:
        """The tokens of each chain."""
        tokens = self._memory["tokens"]
        return [
            tokens[i * self._room : i * self._room + drafted].tolist()
            for i, drafted in enumerate(self._memory["drafted"])
        ]


class TreeBuffers(FurtherPasses):
    """Trees of likeliest tokens, which consider the same tokens."""

    function = "truedraft_trees"

    def __init__(self, growth: TreeGrowth, limits: Sequence[TreeLimits]):
        count, self._room = len(limits), max(one.most for one in limits) or 1
        lines = count * (self._room + 1)
        self._growth, self._limits = growth, limits
        self._memory = {
            "most": array("q", [one.most for one in limits]), "deepest": array("q", [one.deepest for one in limits]),
            "budget": array("q", [one.budget for one in limits]), **_ends(limits),
            "below": array("d", [below for below, _ in growth.sure] or [0]),
            "limit": array("q", [count for _, count in growth.sure] or [0]),
            **{name: zeros("q", lines) for name in ("token", "parent", "read", "order")},
            **{name: zeros("q", count) for name in ("size", "reads", "orders", "passes")},
            "score": zeros("d", lines), "seconds": zeros("d", growth.levels),
        }  # fmt: skip
        shapes = [one.shape for one in limits if one.shape is not None]
        if shapes:
            self._memory["shape_from"] = array("q", accumulate(map(len, shapes), initial=0))
            self._memory["shape"] = array("q", [*chain.from_iterable(shapes)])

    def arguments(self, logits: int) -> TreeArguments:
        growth = self._growth
        self._given = TreeArguments(
            trees=len(self._limits), logits=logits, room=self._room, children=growth.children, beam=growth.beam,
            kept=growth.kept, width=growth.width, levels=growth.levels, limits=len(growth.sure), nodes=growth.nodes,
            more=growth.more, places=growth.places, decay=growth.decay, plain=growth.plain, node=growth.node,
            level=growth.level, gain=growth.gain, threshold=growth.threshold, rank=growth.rank,
            **_columns(self._limits[0].columns), **_pointers(self._memory),
        )  # fmt: skip
        return self._given

    def grown(self) -> tuple[list[GrownTree], list[float]]:
        """The trees, and the seconds of each level."""
        m, found = self._memory, list[GrownTree]()
        for i, (size, reads, orders, passes) in enumerate(
            zip(m["size"], m["reads"], m["orders"], m["passes"], strict=True)
        ):
            first = i * (self._room + 1)
            nodes = slice(first + 1, first + size)
            tokens, parents, scores = (m[name][nodes].tolist() for name in ("token", "parent", "score"))
            read, kept = m["read"][first : first + reads].tolist(), m["order"][first : first + orders].tolist()
            found.append(GrownTree(tokens, parents, scores, read, kept, passes))
        return found, m["seconds"][: self._given.made].tolist()


def zeros(code: str, count: int) -> array[Any]:
    """An array of so many zeros, of 8 bytes each."""
    return array(code, bytes(8 * count))


def _ends(each: Sequence[GreedyChain | TreeLimits]) -> dict[str, array[Any]]:
    ends = [one.ends for one in each]
    from_each = array("q", accumulate(map(len, ends), initial=0))
    return {"end_from": from_each, "ends": array("q", [*chain.from_iterable(ends), 0])}


def _columns(columns: Tensor | int) -> dict[str, int]:
    if isinstance(columns, Tensor):
        return {"columns": len(columns), "column": columns.data_ptr()}
    return {"columns": columns, "column": 0}


def _pointers(memory: dict[str, array[Any]]) -> dict[str, int]:
    return {name: each.buffer_info()[0] for name, each in memory.items()}


class ExtendingPass(Runner):
    """The part of `CompiledPass` that goes on with trees.

    greedy_chains: whether one call can make the passes of a chain, or of a tree.
    """

    greedy_chains = True

    @abstractmethod
    def __call__(
        self, nodes: Nodes, gather: Sequence[int], embeds: Tensor | None = None, hidden: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]: ...

    @abstractmethod
    def _execute(self, ops: Array[Op], *args: Any) -> None: ...

    @abstractmethod
    def _ops(self, hidden: tuple[int, ...], reduction: Reduction) -> Array[Op]: ...

    @abstractmethod
    def _reserve(self, nodes: int) -> None: ...

    @abstractmethod
    def _stride(self, name: str) -> int: ...

    def extend(
        self, trees: Sequence[DraftTree], written: Sequence[int], last: Sequence[int], taps: Taps
    ) -> tuple[Tensor, dict[int, Tensor]]:
        nodes, gather = Nodes(), list[int]()
        each = zip(self.cache.cursor.lengths, trees, written, last, strict=True)
        for slot, (length, tree, known, count) in enumerate(each):
            nodes.add_tree(slot, length, tree, written=known)
            gather += range(len(nodes) - count, len(nodes))
        logits, states = self(nodes, gather, hidden=taps.hidden)
        return logits, {layer: state[gather] for layer, state in states.items()}

    def extend_greedily(
        self, trees: Sequence[DraftTree], written: Sequence[int], chains: Sequence[GreedyChain | None]
    ) -> list[list[int]] | None:
        if not self.greedy_chains:
            return None
        behind = ChainBuffers([one for one in chains if one is not None])
        self._extend_last(trees, written, chains, behind, 1)
        made = iter(behind.tokens())
        return [[] if one is None else next(made) for one in chains]

    def extend_trees(
        self,
        trees: Sequence[DraftTree],
        written: Sequence[int],
        growth: TreeGrowth,
        limits: Sequence[TreeLimits | None],
    ) -> tuple[list[GrownTree | None], list[float]] | None:
        if not self.greedy_chains:
            return None
        behind = TreeBuffers(growth, [one for one in limits if one is not None])
        self._extend_last(trees, written, limits, behind, growth.width)
        found, seconds = behind.grown()
        made = iter(found)
        return [None if one is None else next(made) for one in limits], seconds

    def _extend_last(
        self, trees: Sequence[DraftTree], written: Sequence[int], each: Sequence[object | None], behind: FurtherPasses,
        width: int,
    ) -> None:  # fmt: skip
        """A pass over the trees of slots where `each` has something, and further ones behind their last nodes.

        width: nodes of a slot in a further pass, at most.
        """
        nodes, gather = Nodes(), list[int]()
        every = zip(self.cache.cursor.lengths, trees, written, each, strict=True)
        for slot, (length, tree, known, one) in enumerate(every):
            if one is not None:
                nodes.add_tree(slot, length, tree, written=known)
                gather.append(len(nodes) - 1)
        later = width * len(gather)
        logits = floats(later, self._stride("logits"))
        self._reserve(max(len(nodes), later))
        self._execute(self._ops((), WHOLE), nodes, gather, None, [logits], {}, behind)


def floats(*shape: int) -> Tensor:
    """A new buffer of fp32, whatever torch's default is."""
    return torch.empty(*shape, dtype=torch.float32)
