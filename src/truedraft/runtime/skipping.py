"""Skips decoder layers and neurons in passes by the model's own forward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime.fingerprint import does_more
from truedraft.runtime.modules import ATTENTION, FEED_FORWARD
from truedraft.runtime.overrides import Override, overridden
from truedraft.runtime.sparing import SparingForward
from truedraft.runtime.sparse import Feeds, check_sizes
from truedraft.runtime.tapping import CALL, blocks_of, given, one_token
from truedraft.views._base import Reduction

BESIDE = re.compile("Norm|Dropout")  # classes that are no half, whatever their names


class SkippableLayers:
    """The decoder layers of a model, some of which a pass may skip: these return their input hidden states. Of others
    it may run some of the neurons.

    A forward over one token checks that layers pass nothing but hidden states to each other, and which of them add
    their halves to these.

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
        self._layers, self._head = layers, model.get_output_embeddings()
        self._hidden: int = model.config.get_text_config(decoder=True).hidden_size
        self._feeds: Feeds | None = None
        self._model, self._read = model, False
        if any(does_more(layer) for layer in self._layers):
            raise self._refused("they have hooks or replaced forwards")
        self._halves = [_Halves(layer) for layer in layers]
        self._values = self._observed(model)

    def check(self, reduction: Reduction) -> None:
        """Raises Refused where it leaves out a half of a layer that does not add its halves to the hidden states, or
        neurons that are not those of plain feed-forwards, or not predicted for this model."""
        if bad := sorted(i for i in reduction.halves if not self._halves[i].added):
            raise Refused(
                f"the halves of layers {bad} of {self._name} cannot be skipped: attention and feed-forward are not "
                "modules whose results are added to the hidden state one by one"
            )
        if reduction.spared and not self._read:
            self._find_readers()
        if bad := [i for i in reduction.spared if self._halves[i].between is None]:
            raise Refused(
                f"the feed-forwards of layers {bad} of {self._name} cannot be skipped by node: they are no "
                "modules whose results are added to a hidden state that a module reads"
            )
        if reduction.neurons is not None:
            self._feeds = self._feeds or Feeds(self._layers, self._hidden, self._name)
            check_sizes(reduction.neurons, self._hidden, self._feeds.sizes, self._name)

    def without(self, reduction: Reduction, whole: Tensor | None = None) -> AbstractContextManager[None]:
        """Within the block, this thread's next call of the model leaves out what the reduction does.

        whole: (rows, width), of nodes that skip nothing by themselves; None for none.
        """
        skipped = [(self._layers[i], "forward", _returning(self._values[i])) for i in sorted(reduction.layers)]
        halves = [self._halves[i].without(i in reduction.attention) for i in sorted(reduction.halves)]
        head = [(self._head, CALL, lambda states: states[..., :0])] if reduction.output_head and self._head else []
        spared: list[Override] = []
        if reduction.sparing:
            forward = SparingForward(reduction.sparing.similarity, whole)
            for i in reduction.spared:
                spared += forward.overrides(self._layers[i], *self._halves[i].spared)
        neurons: Iterable[Override] = ()
        if reduction.neurons is not None and self._feeds is not None:
            neurons = self._feeds.without(reduction.neurons, reduction.feed_forward)
        return overridden([*skipped, *halves, *spared, *head, *neurons])

    @torch.no_grad()
    def _find_readers(self) -> None:
        """Find the modules between the halves of all layers, by a forward over one token."""

        def noting(layer: nn.Module, halves: _Halves) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                halves.read(args, kwargs)
                return type(layer).forward(layer, *args, **kwargs)

            return forward

        noted = zip(self._layers, self._halves, strict=True)
        with overridden((layer, "forward", noting(layer, halves)) for layer, halves in noted):
            self._model(input_ids=one_token(self._model), use_cache=False, return_dict=True)
        self._read = True

    @torch.no_grad()
    def _observed(self, model: Any) -> list[int]:
        """Size of the tuple that each layer returns; 0 for a single tensor."""
        calls: list[_Call] = []

        def noting(layer: nn.Module, halves: _Halves) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                states = given(args, kwargs).clone()
                with overridden(halves.noting()):
                    returned = type(layer).forward(layer, *args, **kwargs)
                calls.append(_Call(states, [*args, *kwargs.values()], returned))
                halves.check(states, args, kwargs)
                return returned

            return forward

        noted = zip(self._layers, self._halves, strict=True)
        with overridden((layer, "forward", noting(layer, halves)) for layer, halves in noted):
            model(input_ids=one_token(model), use_cache=False, return_dict=True)
        if len(calls) != len(self._layers) or not all(after.follows(call) for call, after in pairwise(calls)):
            raise self._refused("they do not simply follow each other")
        return [_values(call.returned) for call in calls]

    def _refused(self, why: str) -> Refused:
        return Refused(f"the layers of {self._name} cannot be skipped: {why}")


class _Halves:
    """The attention and the feed-forward of a layer.

    added: whether each is added to the hidden states, so that they pass it unchanged where it is zero.
    between: the module that reads the hidden states between them; None where there is none.
    """

    def __init__(self, layer: Any):
        self._layer, self.added = layer, False
        self.between: nn.Module | None = None
        found = [module_named(layer, pattern) for pattern in (ATTENTION, FEED_FORWARD)]
        self._modules = [one for one in found if one is not None and not does_more(one)]
        self._values = [0, 0]  # sizes of the tuples that they return

    def noting(self) -> Iterator[Override]:
        """Overrides under which a forward of the layer notes what they return."""
        for i, module in enumerate(self._modules):

            def forward(*args: Any, i: int = i, own: Any = module, **kwargs: Any) -> Any:
                returned = type(own).forward(own, *args, **kwargs)
                self._values[i] = _values(returned)
                return returned

            yield module, "forward", forward

    def check(self, states: Tensor, args: Any, kwargs: Any) -> None:
        """Set `added`, by a forward of the layer without both; states: a copy of its input hidden states."""
        if len(self._modules) == len(self._values):
            try:
                with overridden([self.without(True), self.without(False)]):
                    returned = type(self._layer).forward(self._layer, *args, **kwargs)
            except (TypeError, AttributeError, ValueError):  # it does more with their results than add them
                return
            self.added = torch.equal(_first(returned), states)

    def read(self, args: Any, kwargs: Any) -> None:
        """Find `between`, by a call of the layer with these arguments."""
        if self.added:
            self.between = self._reader(args, kwargs)

    def _reader(self, args: Any, kwargs: Any) -> nn.Module | None:
        """The last module, of those up to the feed-forward, whose input is the layer's output without this."""
        with overridden([self.without(False)]):
            between = _first(type(self._layer).forward(self._layer, *args, **kwargs))
        found: list[nn.Module] = []

        def noting(module: Any) -> Override:
            def call(*args: Any, **kwargs: Any) -> Any:
                states = args[0] if args else kwargs.get("hidden_states")
                if isinstance(states, Tensor) and torch.equal(states, between) and self._modules[1] not in found:
                    found.append(module)
                return getattr(type(module), CALL)(module, *args, **kwargs)

            return module, CALL, call

        with overridden(map(noting, self._layer.children())):
            type(self._layer).forward(self._layer, *args, **kwargs)
        return found[-1] if found else None

    @property
    def spared(self) -> tuple[Any, Any, Callable[..., Any]]:
        """What reads the hidden states before the feed-forward; this; and a call that returns zeros in its place."""
        return self.between, self._modules[1], _returning(self._values[1], torch.zeros_like)

    def without(self, attention: bool) -> Override:
        """An override under which the layer's attention, or else its feed-forward, returns zeros: of its call, because
        others override its forward."""
        i = 0 if attention else 1
        return self._modules[i], CALL, _returning(self._values[i], torch.zeros_like)


def _first(returned: Any) -> Any:
    return returned[0] if isinstance(returned, tuple) else returned


def module_named(layer: nn.Module, pattern: re.Pattern[str]) -> nn.Module | None:
    """The one child of a layer with such a name that computes something; None where there is not just one."""
    named = [module for name, module in layer.named_children() if pattern.search(name)]
    found = [module for module in named if not BESIDE.search(type(module).__name__)]
    return found[0] if len(found) == 1 else None


def _returning(values: int, of: Callable[[Tensor], Tensor] = lambda states: states) -> Callable[..., Any]:
    """A forward that returns its input, or something made of it: as a tensor if `values` is 0, else first in a tuple of
    that size."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        states = of(given(args, kwargs))
        return (states, *[None] * (values - 1)) if values else states

    return forward


def _values(returned: Any) -> int:
    """Size of a returned tuple; 0 for a single tensor."""
    return len(returned) if isinstance(returned, tuple) else 0


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
