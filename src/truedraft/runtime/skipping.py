"""Skips decoder layers in passes by the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime.fingerprint import does_more
from truedraft.runtime.overrides import overridden
from truedraft.runtime.tapping import blocks_of, given, one_token


class SkippableLayers:
    """The decoder layers of a model, some of which a pass may skip: these return their input hidden states.

    A forward over one token checks that layers pass nothing but hidden states to each other.

    Args:
        count: of the decoder's layers.

    Raises:
        Refused: the layers are not found, pass more than hidden states to each other, share keys and values, or have
            hooks or replaced forwards, which cannot be skipped for a single pass.
    """

    def __init__(self, model: PreTrainedModel, count: int):
        self._name = type(model).__name__
        layers = blocks_of(model, count)
        if layers is None:
            raise self._refused("they are not found")
        check_own_keys(model)
        self._layers = layers
        if any(does_more(layer) for layer in self._layers):
            raise self._refused("they have hooks or replaced forwards")
        self._values = self._observed(model)

    def without(self, skipped: frozenset[int]) -> AbstractContextManager[None]:
        """Within the block, this thread's calls of the model skip these layers."""
        return overridden((self._layers[i], "forward", self._returning(self._values[i])) for i in sorted(skipped))

    @staticmethod
    def _returning(values: int) -> Callable[..., Any]:
        """A forward that returns its input: as a tensor if `values` is 0, else first in a tuple of that size."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            states = given(args, kwargs)
            return (states, *[None] * (values - 1)) if values else states

        return forward

    @torch.no_grad()
    def _observed(self, model: Any) -> list[int]:
        """Size of the tuple that each layer returns; 0 for a single tensor."""
        calls: list[_Call] = []

        def noting(layer: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                states = given(args, kwargs).clone()
                returned = type(layer).forward(layer, *args, **kwargs)
                calls.append(_Call(states, [*args, *kwargs.values()], returned))
                return returned

            return forward

        with overridden((layer, "forward", noting(layer)) for layer in self._layers):
            model(input_ids=one_token(model), use_cache=False, return_dict=True)
        if len(calls) != len(self._layers) or not all(after.follows(call) for call, after in pairwise(calls)):
            raise self._refused("they do not simply follow each other")
        return [len(call.returned) if isinstance(call.returned, tuple) else 0 for call in calls]

    def _refused(self, why: str) -> Refused:
        return Refused(f"the layers of {self._name} cannot be skipped: {why}")


def check_own_keys(model: Any) -> None:
    """Raises Refused where layers read the keys and values of others, which cannot be skipped then."""
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", None):
        raise Refused(
            f"the layers of {type(model).__name__} cannot be skipped: some read the keys and values of others"
        )


@dataclass
class _Call:
    """A call of a layer. states: a copy of its input hidden states. given: its arguments."""

    states: Tensor
    given: list[Any]
    returned: Any

    def follows(self, before: _Call) -> bool:
        """Whether this layer's input is the hidden states of the previous one, and nothing else that it returned."""
        states, *others = before.returned if isinstance(before.returned, tuple) else (before.returned,)
        handed_on = any(value is other for value in self.given for other in others if other is not None)
        return torch.equal(self.states, states) and not handed_on
