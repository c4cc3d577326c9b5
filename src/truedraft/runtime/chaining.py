"""Compiled passes that go on with trees: nodes behind those that earlier passes wrote, and chains of likeliest tokens,
of which one call makes the passes of all tokens (`native/chains.inc`)."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from ctypes import Array
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from truedraft.runtime._base import GreedyChain, Runner
from truedraft.runtime.native import ChainArguments, Op
from truedraft.runtime.nodes import Nodes
from truedraft.tree import DraftTree, Taps
from truedraft.views._base import WHOLE, Reduction


class ChainBuffers:
    """The arguments for some chains, which consider the same tokens, and the memory that these point to.

    Args:
        logits: index of the buffer with these.
    """

    def __init__(self, chains: Sequence[GreedyChain], logits: int):
        columns, count = chains[0].columns, len(chains)
        self._room = max(one.most for one in chains) or 1
        most = array("q", [one.most for one in chains])
        ends = [one.ends for one in chains]
        end_from = array("q", accumulate(map(len, ends), initial=0))
        flat = array("q", [*chain.from_iterable(ends), 0])
        self._tokens, self._drafted = array("q", bytes(8 * count * self._room)), array("q", bytes(8 * count))
        self._kept = columns, most, end_from, flat
        self.arguments = ChainArguments(
            chains=count, logits=logits, room=self._room, least=chains[0].least,
            columns=len(columns) if isinstance(columns, Tensor) else columns,
            column=columns.data_ptr() if isinstance(columns, Tensor) else 0,
            **{
                name: memory.buffer_info()[0]
                for name, memory in (
                    ("most", most), ("end_from", end_from), ("ends", flat), ("tokens", self._tokens),
                    ("drafted", self._drafted),
                )
            },
        )  # fmt: skip

    def tokens(self) -> list[list[int]]:
        """The tokens of each chain."""
        return [
            self._tokens[i * self._room : i * self._room + drafted].tolist() for i, drafted in enumerate(self._drafted)
        ]


class ExtendingPass(Runner):
    """The part of `CompiledPass` that goes on with trees.

    greedy_chains: whether one call can make the passes of a chain.
    """

    greedy_chains = True

    @abstractmethod
    def __call__(
        self, nodes: Nodes, gather: Sequence[int], embeds: Tensor | None = None, hidden: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]: ...

    @abstractmethod
    def _execute(self, ops: Array[Op], *args: Any) -> list[list[int]]: ...

    @abstractmethod
    def _ops(self, hidden: tuple[int, ...], reduction: Reduction) -> Array[Op]: ...

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
        nodes, gather = Nodes(), list[int]()
        each = zip(self.cache.cursor.lengths, trees, written, chains, strict=True)
        for slot, (length, tree, known, one) in enumerate(each):
            if one is not None:
                nodes.add_tree(slot, length, tree, written=known)
                gather.append(len(nodes) - 1)
        logits = floats(len(gather), self._stride("logits"))
        made = iter(
            self._execute(self._ops((), WHOLE), nodes, gather, None, [logits], {}, [c for c in chains if c is not None])
        )
        return [[] if one is None else next(made) for one in chains]


def floats(*shape: int) -> Tensor:
    """A new buffer of fp32, whatever torch's default is."""
    return torch.empty(*shape, dtype=torch.float32)
