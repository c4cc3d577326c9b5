"""Feed-forwards that nodes skip by their own hidden states, in passes by the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from truedraft.runtime.overrides import Override
from truedraft.runtime.tapping import CALL, given


class SparingForward:
    """One forward of a model: which of its nodes skip the feed-forwards that are still to come.

    Args:
        similarity: see `Sparing`.
        whole: (rows, width), of nodes that skip none; None for none.
    """

    def __init__(self, similarity: float, whole: Tensor | None):
        self._similarity, self._whole = similarity, whole
        self._skips: Tensor | None = None  # (rows, width), of nodes; None before the first feed-forward
        self._before: Tensor = torch.empty(0)  # (rows, width, H), the hidden states before a feed-forward

    def overrides(
        self, layer: nn.Module, reader: nn.Module, module: nn.Module, zeros: Callable[..., Any]
    ) -> Iterator[Override]:
        """Those of a layer.

        Args:
            reader: reads the hidden states before the feed-forward; it may be this itself.
            module: the feed-forward.
            zeros: is called in its place where all nodes skip it.
        """

        def read(*args: Any, **kwargs: Any) -> Any:
            self._before = given(args, kwargs)
            return getattr(type(reader), CALL)(reader, *args, **kwargs)

        def fed_forward(*args: Any, **kwargs: Any) -> Any:
            if reader is module:
                self._before = given(args, kwargs)
            if self._skips is not None and bool(self._skips.all()):
                return zeros(*args, **kwargs)
            return self._without(getattr(type(module), CALL)(module, *args, **kwargs))

        def forward(*args: Any, **kwargs: Any) -> Any:
            returned = type(layer).forward(layer, *args, **kwargs)
            self._decide(returned[0] if isinstance(returned, tuple) else returned)
            return returned

        if reader is not module:
            yield reader, CALL, read
        yield module, CALL, fed_forward
        yield layer, "forward", forward

    def _without(self, returned: Any) -> Any:
        """What a feed-forward returned, zeros at the nodes that skip it."""
        if self._skips is None:
            return returned
        states, *others = returned if isinstance(returned, tuple) else (returned,)
        states = states.masked_fill(self._skips.view(*states.shape[:-1], 1), 0)
        return (states, *others) if isinstance(returned, tuple) else states

    def _decide(self, after: Tensor) -> None:
        """Nodes whose hidden states are similar to those before a feed-forward skip the following ones."""
        precise = torch.promote_types(after.dtype, torch.float32)
        similar = cosine_similarity(self._before.to(precise), after.to(precise), -1) > self._similarity
        if self._whole is not None:
            similar &= ~self._whole
        self._skips = similar if self._skips is None else self._skips | similar
