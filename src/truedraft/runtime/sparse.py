"""Runs some of the neurons of feed-forwards in passes by the model's own forward: activations of others are zero."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from truedraft.errors import Refused
from truedraft.runtime.modules import feed_forward_linears, inputs_of, outputs_of
from truedraft.runtime.overrides import Override
from truedraft.runtime.tapping import CALL, given
from truedraft.views._neurons import Neurons, Predictors


class Feeds:
    """The feed-forwards of a decoder's layers, each by its last linear layer, which reads the activations of neurons.

    Args:
        hidden: size of hidden states.
        name: of the model, for messages.

    Attributes:
        last: these linear layers.
        sizes: by layer, its neurons.

    Raises:
        Refused: a layer has another number of linear layers than one that return hidden states, as mixtures of experts
            do.
    """

    def __init__(self, layers: Sequence[nn.Module], hidden: int, name: str):
        self._layers, self.last = layers, list[Any]()
        self._placed: WeakKeyDictionary[Predictors, Predictors] = WeakKeyDictionary()
        for i, layer in enumerate(layers):
            found = [linear for linear in feed_forward_linears(layer) if outputs_of(linear) == hidden]
            if len(found) != 1 or any(p.ndim > 2 for p in layer.parameters()):
                raise refused(name, f"layer {i} has experts, or no single linear layer behind its neurons")
            self.last.append(found[0])
        self.sizes = [inputs_of(last) for last in self.last]

    def without(self, neurons: Neurons, whole: frozenset[int]) -> Iterator[Override]:
        """Overrides under which neurons run as chosen by the input of their layer, but for layers that do not run."""
        placed = replace(neurons, predictors=self._on_device(neurons.predictors))
        for i, (layer, last) in enumerate(zip(self._layers, self.last, strict=True)):
            if i not in whole:
                yield from self._chosen(i, layer, last, placed)

    def noting(self, states: list[Tensor], activations: list[Tensor]) -> Iterator[Override]:
        """Overrides under which a forward appends the input of each layer, and the activations of its neurons."""
        for layer, last in zip(self._layers, self.last, strict=True):

            def forward(*args: Any, layer: Any = layer, **kwargs: Any) -> Any:
                states.append(given(args, kwargs))
                return type(layer).forward(layer, *args, **kwargs)

            def call(active: Tensor, last: Any = last) -> Any:
                activations.append(active)
                return getattr(type(last), CALL)(last, active)

            yield layer, "forward", forward
            yield last, CALL, call

    def norms(self) -> list[Tensor]:
        """By layer, the norms (neurons,) of what each adds to the hidden state at an activation of one, in fp32."""
        matrices = (last.weight.T if type(last) is Conv1D else last.weight for last in self.last)
        return [matrix.float().norm(dim=0) for matrix in matrices]

    def _on_device(self, predictors: Predictors) -> Predictors:
        device = self.last[0].weight.device
        if next(predictors.parameters()).device == device:
            return predictors
        if predictors not in self._placed:
            self._placed[predictors] = copy.deepcopy(predictors).to(device)
        return self._placed[predictors]

    @staticmethod
    def _chosen(i: int, layer: Any, last: Any, neurons: Neurons) -> Iterator[Override]:
        chosen: list[Tensor] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            marks = neurons.chosen(i, given(args, kwargs)).repeat_interleave(neurons.predictors.size, -1)
            chosen[:] = [marks]
            return type(layer).forward(layer, *args, **kwargs)

        def call(activations: Tensor) -> Any:
            return getattr(type(last), CALL)(last, activations * chosen[0].view(activations.shape))

        yield layer, "forward", forward
        yield last, CALL, call


def refused(name: str, why: str) -> Refused:
    return Refused(f"{name} cannot run some of its neurons: {why}")


def check_sizes(neurons: Neurons, hidden: int, sizes: Sequence[int], name: str) -> None:
    """Raises Refused where predictors are of other sizes than a model: of hidden states, and of neurons by layer."""
    predictors = neurons.predictors
    if predictors.hidden != hidden or [predictors.size * count for count in predictors.groups] != list(sizes):
        raise refused(
            name, f"the predictors are of {len(predictors.groups)} layers of other sizes: train them for this model"
        )
