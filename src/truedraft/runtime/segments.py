"""Consecutive layers of a decoder that run alone, from hidden states, by the model's own forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from truedraft.runtime.overrides import Override, overridden, own
from truedraft.runtime.skipping import SkippableLayers
from truedraft.runtime.tapping import CALL, blocks_of, given
from truedraft.views._base import Reduction


class Segments:
    """Runs of a decoder's layers; final norm and output head read what the last of them leaves.

    Args:
        count: of the decoder's layers.

    Raises:
        Refused: see `SkippableLayers`.
    """

    def __init__(self, model: PreTrainedModel, count: int):
        self._skippable = SkippableLayers(model, count)
        self._blocks: Any = blocks_of(model, count)

    @contextmanager
    def running(self, first: int, last: int, states: Tensor | None = None) -> Iterator[list[Tensor]]:
        """Within the block, this thread's next call of the model runs the layers from `first` to before `last` alone.

        Args:
            states: (rows, width, H) hidden states that they begin from; None for the embeddings of the call's tokens.

        Returns:
            A list, to which the call appends the hidden states that they leave.
        """
        left: list[Tensor] = []
        rest = frozenset(range(len(self._blocks))) - frozenset(range(first, last))
        with self._skippable.without(Reduction(rest, rest)), overridden(self._between(first, last, states, left)):
            yield left

    def _between(self, first: int, last: int, states: Tensor | None, left: list[Tensor]) -> Iterator[Override]:
        for i in {first, last - 1} if first < last else ():
            yield self._blocks[i], CALL, self._call(i, states if i == first else None, left if i == last - 1 else None)

    def _call(self, index: int, states: Tensor | None, left: list[Tensor] | None) -> Any:
        block = self._blocks[index]

        def call(*args: Any, **kwargs: Any) -> Any:
            if states is not None:
                same = states.to(given(args, kwargs))
                args, kwargs = ((same, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": same})
            found = own(block, CALL)(*args, **kwargs)
            if left is not None:
                left.append(found if isinstance(found, Tensor) else found[0])
            return found

        return call
