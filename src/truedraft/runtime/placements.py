"""Supernets: layers that hold several token mixers under names, of which one is active (Super Apriel).

A layer's choice is a module with a `ModuleDict` of mixers and one attribute that names the active one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from truedraft.errors import Refused
from truedraft.runtime.overrides import Override, Rule
from truedraft.runtime.padded import Padded

WINDOWS = ("window_size", "sliding_window")  # what mixers call the positions that they attend to


@dataclass(frozen=True)
class Choice:
    """The mixers of a layer. attribute: of `module`, the name of the active one."""

    module: nn.Module
    mixers: nn.ModuleDict
    attribute: str

    @property
    def active(self) -> str:
        return str(getattr(self.module, self.attribute))

    @property
    def windowed(self) -> list[str]:
        """The mixers that attend to a window."""
        return [name for name, mixer in self.mixers.items() if _window(mixer)]


def choices(model: nn.Module) -> list[Choice]:
    """By layer; empty for models whose layers have one mixer."""
    found = []
    for module in model.modules():
        for part in module.children():
            if isinstance(part, nn.ModuleDict) and len(part) > 1:
                named = [name for name, value in vars(module).items() if isinstance(value, str) and value in part]
                found += [Choice(module, part, name) for name in named[:1]]
    return found


def placed(model: nn.Module, names: Sequence[str]) -> Any:
    """A model of the same weights, none of them copied, in which other mixers are active.

    names: of the mixers by layer, repeated along the layers.

    Raises:
        Refused: a layer has no such mixer.
    """
    made = copy.deepcopy(model, {id(kept): kept for kept in (*model.parameters(), *model.buffers())})
    for choice, name in zip(choices(made), cycle(names), strict=False):
        if name not in choice.mixers:
            raise Refused(f"there is no mixer {name!r} in a layer: it has {', '.join(choice.mixers)}")
        setattr(choice.module, choice.attribute, name)
    return made


def windowed(model: nn.Module) -> list[Rule]:
    """Overrides of the active mixers that attend to a window, which a mask of all positions does not have."""
    active = [choice.mixers[choice.active] for choice in choices(model)]
    return [partial(_by_position, mixer, window) for mixer in active if (window := _window(mixer))]


def _window(mixer: nn.Module) -> int:
    """Positions that a mixer attends to; 0 where it attends to all, or keeps states."""
    found = (vars(mixer).get(name) for name in WINDOWS)
    return next((window for window in found if type(window) is int), 0)


def _by_position(mixer: Any, window: int, nodes: Padded, extent: int) -> Override:
    """The mixer's own forward, with a mask that has the window; on a CPU, over the entries that any node sees."""
    first = max(int(nodes.positions.min()) - window + 1, 0) if nodes.positions.device.type == "cpu" else 0
    far = ~nodes.near(extent, window)[:, None, :, first:]

    def forward(*args: Any, attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            hidden = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
            attention_mask = attention_mask[..., first:].masked_fill(far, hidden)
            past_key_values = past_key_values and _Recent(past_key_values, first)
        given = dict(attention_mask=attention_mask, past_key_values=past_key_values)
        return type(mixer).forward(mixer, *args, **given, **kwargs)

    return mixer, "forward", forward


class _Recent:
    """A cache of which attention reads the entries from an index on."""

    def __init__(self, cache: Any, first: int):
        self._cache, self._first = cache, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(entries[:, :, self._first :] for entries in self._cache.update(*args, **kwargs))
