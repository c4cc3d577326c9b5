"""Passes over consecutive layers of a decoder, which begin from hidden states: compiled, or by its own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from truedraft.caches.rows import RowCache
from truedraft.runtime.compiled import CompiledPass
from truedraft.runtime.forward import ForwardPass, LinearsPass
from truedraft.runtime.native import OpKind
from truedraft.runtime.nodes import Nodes
from truedraft.runtime.padded import Padded
from truedraft.runtime.program import Program
from truedraft.runtime.segments import Segments
from truedraft.runtime.weights import NotCompilable
from truedraft.tree import DraftTree, Taps
from truedraft.views._base import Reduction


class SegmentPasses(Protocol):
    """Runs some layers over chains of tokens behind what they have read of each slot."""

    def attach(self, cache: RowCache) -> None:
        """Set the cache of the following passes, which is the target's."""

    def run(
        self, first: int, last: int, chains: Sequence[Sequence[int]], read: Sequence[int],
        states: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run the layers from `first` to before `last`.

        Args:
            chains: by slot, the tokens; none of a slot that is left out.
            read: by slot, how many tokens these layers have read.
            states: by slot, (count, H) hidden states of the tokens that the layers begin from; used where `first` is
                not 0.

        Returns:
            (slots, V) logits after the last token of each chain, and by slot the (count, H) hidden states that the
            layers leave; anything of slots that are left out.
        """


class CompiledSegments:
    """See `SegmentPasses`. passes: of the whole model, attached to the target's cache."""

    def __init__(self, passes: CompiledPass):
        self._passes = passes

    def attach(self, cache: RowCache) -> None:
        """Does nothing: the target attaches its passes."""

    def run(
        self, first: int, last: int, chains: Sequence[Sequence[int]], read: Sequence[int],
        states: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        nodes, sizes = Nodes(), [len(chain) for chain in chains]
        for slot, (chain, start) in enumerate(zip(chains, read, strict=True)):
            if chain:
                nodes.add_chain(slot, start, list(chain), len(chain))
        ends = torch.tensor(sizes).cumsum(0) - 1
        some = [slot for slot, size in enumerate(sizes) if size]
        given = torch.cat([one for one in states if one is not None]) if first else None
        rest = frozenset(range(len(self._passes.program.layer_types))) - frozenset(range(first, last))
        logits, left = self._passes(nodes, ends[some].tolist(), given, (last,), Reduction(rest, rest))
        found = logits.new_zeros(len(chains), logits.shape[1])
        found[some] = logits
        return found, list(left[last].split(sizes))


class ForwardSegments:
    """See `SegmentPasses`: by the model's own forward, with compiled linear layers where there are some.

    Args:
        kinds, window: of the model's layers, see `ForwardPass`.

    Raises:
        Refused: see `Segments`.
    """

    def __init__(self, model: Any, kinds: Sequence[str], window: int | None):
        self._segments = Segments(model, len(kinds))
        try:
            self._passes: ForwardPass = LinearsPass(model, kinds, window)
        except NotCompilable:
            self._passes = ForwardPass(model, kinds, window)
        self._model = model

    def attach(self, cache: RowCache) -> None:
        self._passes.attach(cache)
        self._cache = cache

    @torch.no_grad()
    def run(
        self, first: int, last: int, chains: Sequence[Sequence[int]], read: Sequence[int],
        states: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        device, width = self._model.device, max(map(len, chains))
        trees = [DraftTree.chain(chain[0], chain[1:]) if chain else DraftTree.chain(0) for chain in chains]
        nodes = Padded.of(trees, read, width, device).to(device)
        self._cache.cursor.placed(nodes.places, max(read) + width)
        with self._segments.running(first, last, self._padded(states, width) if first else None) as left:
            logits, _ = self._passes.forward_nodes(nodes, max(read) + width, Taps())
        ends = torch.tensor([len(tree) - 1 for tree in trees], device=logits.device)
        of_slots = left[0] if left else logits[..., :0]
        return logits[torch.arange(len(trees), device=logits.device), ends], [
            one[: len(chain)] for one, chain in zip(of_slots, chains, strict=True)
        ]

    def _padded(self, states: Sequence[Tensor | None], width: int) -> Tensor:
        """(slots, width, H); padding is a copy of a slot's last states."""
        size = self._model.config.get_text_config(decoder=True).hidden_size
        found = torch.zeros(len(states), width, size, dtype=self._model.dtype, device=self._model.device)
        for row, one in zip(found, states, strict=True):
            if one is not None:
                row[: len(one)] = one
                row[len(one) :] = one[-1]
        return found


def begins_anywhere(program: Program) -> bool:
    """Whether the layers of a compiled pass can begin from hidden states in the place of embeddings."""
    embed = program.ops[0]
    plain = embed.kind == OpKind.EMBED and not embed.second and not (embed.mode and embed.scale != 1.0)
    return plain and program.outputs[0] == 0 and program.tapped
