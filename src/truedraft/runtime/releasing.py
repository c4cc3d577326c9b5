"""Which models keep their weights once, and which of their weights: those of which compiled passes read copies.

A model that `truedraft.load` has loaded is nobody's but truedraft's until it is handed on, so that its weights may be
replaced by the copies (`released.py`); the weights of a model that was given are replaced on request alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from truedraft.runtime import native
from truedraft.runtime.linears import compilable
from truedraft.runtime.panels import ROWS
from truedraft.runtime.processors import processor
from truedraft.runtime.programs import programs_of
from truedraft.runtime.weights import Copies, NotCompilable, Weight, linear_weight

Holders = list[tuple[nn.Module, str]]  # the modules that have a weight, and its names there


class _Thread(threading.local):
    calls = 0  # of truedraft that it is in


_thread = _Thread()


@contextmanager
def in_call() -> Iterator[None]:
    """A call of truedraft, in which the forward of a model is not used by its owner."""
    _thread.calls += 1
    try:
        yield
    finally:
        _thread.calls -= 1


def is_in_call() -> bool:
    return _thread.calls > 0


_LOADED: WeakSet[nn.Module] = WeakSet()


def may_release(model: nn.Module) -> None:
    """Let `released_by_default` replace the weights of a model, which truedraft has loaded."""
    _LOADED.add(model)


def keep_originals(model: nn.Module) -> None:
    """Undo `may_release`, for what trains a model, or measures its own forward."""
    _LOADED.discard(model)


def released_by_default(model: nn.Module, runtime: str = "auto") -> bool:
    """Whether a model keeps its weights once where nothing is said of it: truedraft loaded it, and passes do not need
    its own forward."""
    return model in _LOADED and not model.training and runtime == "auto"


def copies_weights() -> bool:
    """Whether compiled passes read copies of weights: not without AVX-512, where passes of sixteen nodes are slower
    from panels."""
    return native.library() is not None and "avx512f" in processor()


class Noted(Copies):
    """The weights of which a program would read copies; it makes none."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, list[Tensor]] = {}  # by memory

    def made(self, weight: Weight) -> Weight:
        raise NotImplementedError

    def __call__(self, weight: Weight) -> Weight:
        if not weight.panels and weight.scales is None:
            self._parts.setdefault(_memory(weight.values), []).append(weight.values)
        return weight

    def covers(self, weight: Tensor) -> bool:
        """Whether copies are of rows of this weight, each part beginning with a panel."""
        first, width = weight.storage_offset(), weight.shape[-1]
        own = [
            part
            for part in self._parts.get(_memory(weight), [])
            if first <= part.storage_offset() < first + weight.numel()
        ]
        return bool(own) and all(
            part.is_contiguous() and part.shape[-1] == width and (part.storage_offset() - first) % (ROWS * width) == 0
            for part in own
        )


def releasable(model: nn.Module) -> list[Holders]:
    """The holders of each weight that its copy can replace, also of a model on the "meta" device: the weights of linear
    layers, of a head that is tied to the embeddings, and of experts."""
    noted: Noted | None = Noted()
    try:
        programs_of(model, noted)
    except NotCompilable:
        noted = None
    holders: dict[int, Holders] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((module, name))
    return [found for found in holders.values() if _replaceable(found, noted)]


def weight_of(holders: Holders) -> Any:
    module, name = holders[0]
    return module._parameters[name]


def _memory(weight: Tensor) -> int:
    return weight.untyped_storage()._cdata


def _replaceable(holders: Holders, noted: Noted | None) -> bool:
    weight = weight_of(holders)
    if type(weight.data) is not Tensor or weight.device.type not in ("cpu", "meta") or not weight.is_contiguous():
        return False
    if noted is None:
        return len(holders) == 1 and _compiled_alone(*holders[0])
    return all(_read_in_panels(module, name) for module, name in holders) and noted.covers(weight)


def _read_in_panels(module: nn.Module, name: str) -> bool:
    """Whether programs and modules read a weight of this kind in panels too."""
    weight: Any = module._parameters[name]
    if type(module) is nn.Linear or (isinstance(module, nn.Embedding) and module.max_norm is None):
        return name == "weight"
    return weight.ndim == 3 and weight.shape[1] % ROWS == 0


def _compiled_alone(layer: nn.Module, name: str) -> bool:
    """Whether a weight is that of a linear layer whose product is compiled in the model's own forward."""
    if type(layer) is not nn.Linear or name != "weight":
        return False
    try:
        return compilable(linear_weight(layer, layer.weight.dtype), layer.weight.dtype)
    except NotCompilable:
        return False
