"""How the keys in a layer's cache are rotated by their positions, so that other queries can be rotated to match them.

Architectures differ in the layers that rotate, the part of a head that is rotated, which of its numbers rotate together
and at what frequencies. This is measured, not read from classes: a forward whose layer reads the same hidden state at
every position gives keys that differ by their rotation alone, and of the tables that the model computes in that forward
the one is taken that explains them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime.overrides import Override, overridden, own
from truedraft.runtime.rotary import changes
from truedraft.runtime.tapping import CALL, blocks_of, given, one_token

POSITIONS = 24  # of the forward that is measured
ROTATING = re.compile("Rotary")  # in names of classes that compute cosines and sines

Tables = Callable[[Tensor], tuple[Tensor, Tensor]]  # (n,) positions to cosines and sines, (n, planes) each


@dataclass(frozen=True)
class Rotation:
    """A rotation of heads by positions: of the first numbers of a head in planes, each with its own frequency.

    neighbours: whether two adjacent numbers form a plane, not those at the same place of two halves.
    backwards: whether by negative angles.
    """

    tables: Tables
    neighbours: bool
    backwards: bool = False

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: (..., n, head size), each rotated by its position. positions: (n,)."""
        return self._rotated(x, *(part.to(x.dtype) for part in self.tables(positions)))

    def columns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, (n, numbers that are rotated) each, by their places in a head; fp32, of what
        they are in a dtype."""
        cos, sin = (part.to(dtype).float() for part in self.tables(positions))
        both = [part.repeat_interleave(2, -1) if self.neighbours else part.repeat(1, 2) for part in (cos, sin)]
        return both[0].contiguous(), (-both[1] if self.backwards else both[1]).contiguous()

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        count = 2 * cos.shape[-1]
        part, rest = x[..., :count], x[..., count:]
        first, second = (part[..., ::2], part[..., 1::2]) if self.neighbours else part.chunk(2, -1)
        sin = -sin if self.backwards else sin
        rotated = first * cos - second * sin, second * cos + first * sin
        part = torch.stack(rotated, -1).flatten(-2) if self.neighbours else torch.cat(rotated, -1)
        return torch.cat([part, rest], -1)

    def error(self, keys: Tensor) -> float:
        """How far keys, (heads, n, head size), of one hidden state at positions from 0 on are from its rotation."""
        cos, sin = (part.to(keys) for part in self.tables(torch.arange(keys.shape[1], device=keys.device)))
        if 2 * cos.shape[-1] > keys.shape[-1] or not cos[0].all():
            return torch.inf  # tables of other heads
        return _distance(keys, self._rotated(keys[:, :1].expand_as(keys), cos / cos[0], sin / cos[0]))


@dataclass(frozen=True)
class CachedKeys:
    """What a layer of a model keeps of every position.

    heads, size, value_size: of keys and values. rotation: of the keys.
    """

    heads: int
    size: int
    value_size: int
    rotation: Rotation


def cached_keys(model: PreTrainedModel, layer: int, layers: int) -> CachedKeys:
    """Measure what a decoder's layer keeps. layers: of the decoder. A model without numbers, on the meta device, tells
    the sizes alone; the rotation is none then.

    Raises:
        Refused: it keeps other things than keys and values of every position, or their rotation is not found.
    """
    name = type(model).__name__
    blocks = blocks_of(model, layers)
    if blocks is None:
        raise Refused(f"the keys of {name} cannot be read: its layers are not found")
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise Refused(f"the keys of {name} cannot be read: it keeps latents in their place")
    rotating = [module for module in model.modules() if ROTATING.search(type(module).__name__)]
    if any(map(changes, rotating)):
        raise Refused(f"the keys of {name} cannot be read: their rotation changes with the length of a text")
    calls: list[_Call] = []
    cache = DynamicCache()
    with torch.no_grad(), overridden([_constant(blocks[layer]), *(_noting(module, calls) for module in rotating)]):
        model.base_model(input_ids=one_token(model).expand(1, POSITIONS), past_key_values=cache, use_cache=True)
    kept: Any = cache.layers[layer] if layer < len(cache.layers) else None
    keys, values = getattr(kept, "keys", None), getattr(kept, "values", None)
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.shape[2:3] == (POSITIONS,)):
        raise Refused(f"the keys of {name} cannot be read: layer {layer} has no keys and values of every position")
    rotation = Rotation(_none, False) if keys.is_meta else _explained(keys[0], blocks[layer], calls)
    if rotation is None:
        raise Refused(f"the keys of {name} cannot be read: how they depend on their positions is not found")
    return CachedKeys(keys.shape[1], keys.shape[3], values.shape[3], rotation)


def _explained(keys: Tensor, block: nn.Module, calls: list[_Call]) -> Rotation | None:
    """The rotation of keys of one hidden state; None where it is not found."""
    most = 2e-2 if keys.dtype.itemsize < 4 else 1e-3
    keys = keys.float()
    tables = [*(table for call in calls for table in call.tables()), *_buffered(block)]
    candidates = [Rotation(table, *form) for table in tables for form in product((False, True), repeat=2)]
    candidates.append(Rotation(_none, False))
    best = min(candidates, key=lambda one: one.error(keys))
    return best if best.error(keys) <= most else None


def _none(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of keys that do not depend on positions: there are no planes."""
    nothing = positions.new_zeros((len(positions), 0), dtype=torch.float32)
    return nothing, nothing


@dataclass(frozen=True)
class _Call:
    """A call of a module that computes cosines and sines: with `rest` after what it reads and the positions."""

    module: Any
    like: Tensor
    shape: tuple[int, ...]  # of the positions, (..., n)
    rest: tuple[Any, ...]
    named: dict[str, Any]

    def tables(self) -> Iterator[Tables]:
        """Its tables, read as one column for each plane, as two halves of these, or as pairs of these."""
        for columns in (slice(None), slice(0, None, 2), None):
            yield lambda positions, columns=columns: self._table(positions, columns)  # type: ignore[misc]

    def _table(self, positions: Tensor, columns: slice | None) -> tuple[Tensor, Tensor]:
        found = self.module(self.like, positions.expand(*self.shape[:-1], -1), *self.rest, **self.named)
        parts = (found.real, found.imag) if isinstance(found, Tensor) else found
        cos, sin = (part.reshape(-1, *part.shape[-2:])[0].float() for part in parts)
        columns = slice(cos.shape[-1] // 2) if columns is None else columns
        return cos[:, columns], sin[:, columns]


def _noting(module: Any, calls: list[_Call]) -> Override:
    def call(*args: Any, **kwargs: Any) -> Any:
        found = own(module, CALL)(*args, **kwargs)
        named = dict(kwargs)
        like, positions, *rest = [*args, *(named.pop(key) for key in ("x", "position_ids") if key in named)]
        calls.append(_Call(module, like, positions.shape, tuple(rest), named))
        return found

    return module, CALL, call


def _constant(block: nn.Module) -> Override:
    """Give a block the hidden state of the first position at all positions."""

    def call(*args: Any, **kwargs: Any) -> Any:
        states = given(args, kwargs)
        same = states[:, :1].expand_as(states)
        if args:
            return own(block, CALL)(same, *args[1:], **kwargs)
        return own(block, CALL)(**{**kwargs, "hidden_states": same})

    return block, CALL, call


def _buffered(block: nn.Module) -> Iterator[Tables]:
    """Tables that attention keeps itself, of sines and cosines side by side (GPT-J)."""
    for module in block.modules():
        if isinstance(table := getattr(module, "embed_positions", None), Tensor):
            yield lambda positions, table=table: table.to(positions.device)[positions].float().chunk(2, -1)[::-1]  # type: ignore[misc]


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm().clamp_min(torch.finfo(a.dtype).tiny))
