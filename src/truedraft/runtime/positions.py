"""Positions of their own for the nodes of a tree, in decoders that count positions by place in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from truedraft.errors import Refused
from truedraft.runtime.overrides import Override, overridden


class Positions:
    """For the length of a pass, a decoder looks up positions that it is told; otherwise it is as it was.

    Known are a table of positions (`embed_positions`: BART, Marian, Pegasus, M2M100, Whisper) and biases by distance
    (`compute_bias`: T5 and its kin).

    Raises:
        Refused: it has neither.
    """

    def __init__(self, decoder: nn.Module, pad: int):
        self.embedding: nn.Module | None = getattr(decoder, "embed_positions", None)
        self.biases: list[Any] = [
            m
            for m in decoder.modules()
            if hasattr(m, "compute_bias") and getattr(m, "has_relative_attention_bias", False)
        ]
        self.pad = pad
        if self.embedding is None and not self.biases:
            raise Refused(
                f"{type(decoder).__name__} cannot be hosted exactly: its positions come neither from a table "
                "(embed_positions) nor as biases by distance (T5's)"
            )

    def refresh(self, count: int, device: torch.device) -> None:
        """Read the first `count` entries of the table, as the decoder itself looks them up."""
        if (table := self.table(count, device)) is not None:
            self._table, self._blank = table

    def table(self, count: int, device: torch.device) -> tuple[Tensor, Tensor | None] | None:
        """The first `count` positions, (count, H), and what padding has in their place, (1, H), if it is other than
        they; None where there is no table."""
        if self.embedding is None:
            return None
        if isinstance(self.embedding, nn.Embedding):
            count = min(count, _size(self.embedding))
        known, blank = self._looked_up(count, self.pad + 1, device), self._looked_up(1, self.pad, device)
        return known, None if torch.equal(blank, known[:1]) else blank  # M2M100: padding has none

    def counted(self, ids: Tensor) -> Tensor:
        """The positions of the tokens of whole texts, (rows, length): of some models padding counts for none."""
        if self.embedding is not None and self.table(1, ids.device)[1] is not None:  # type: ignore[index]
            return ((ids != self.pad).cumsum(1) - 1).clamp_min(0)
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def _looked_up(self, count: int, token: int, device: torch.device) -> Tensor:
        assert self.embedding is not None
        ids = torch.full((1, count), token, device=device)
        _, takes, *_ = inspect.signature(type(self.embedding).forward).parameters
        return self.embedding(ids.shape if takes == "input_ids_shape" else ids).reshape(count, -1)

    @contextmanager
    def at(self, ids: Tensor, positions: Tensor, places: Tensor) -> Iterator[None]:
        """A pass over nodes `ids` at `positions`, (rows, width), that sees cached places at `places`, (rows, extent)."""
        overrides: list[Override] = []
        if self.embedding is not None:
            here = self._table[positions]
            if self._blank is not None:
                here = torch.where((ids == self.pad)[:, :, None], self._blank, here)
            overrides.append((self.embedding, "forward", lambda *args, **kwargs: here))
        for module in self.biases:
            bias = _biases(module, places[:, None] - positions[:, :, None]).permute(0, 3, 1, 2)
            overrides.append((module, "compute_bias", lambda *args, _bias=bias, **kwargs: _bias))
        with overridden(overrides):
            yield


def table_size(stack: Any) -> int | None:
    """Positions that an encoder or a decoder has a table for; None where it counts distances, or grows the table."""
    table = getattr(stack, "embed_positions", None)
    return _size(table) if isinstance(table, nn.Embedding) else None


def _size(table: nn.Embedding) -> int:
    return table.num_embeddings - int(getattr(table, "offset", 0))


def by_distance(module: Any, first: int, last: int) -> Tensor:
    """Biases for seeing what stands `first` to `last` - 1 positions back, (heads, last - first), fp32."""
    back = torch.arange(first, last, device=module.relative_attention_bias.weight.device)
    return _biases(module, -back).float().T.contiguous()


def _biases(module: Any, distance: Tensor) -> Tensor:
    """Biases of distances from a node to what it sees, (..., heads)."""
    known = {
        "bidirectional": not module.is_decoder,
        "num_buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
    }
    takes = inspect.signature(module._relative_position_bucket).parameters  # not all kin of T5 take them
    bucket = module._relative_position_bucket(distance, **{name: known[name] for name in known if name in takes})
    return module.relative_attention_bias(bucket)
