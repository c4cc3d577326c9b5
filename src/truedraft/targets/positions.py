"""Positions of their own for the nodes of a tree, in decoders that count positions by place in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from truedraft.errors import Refused


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
        self._pad = pad
        if self.embedding is None and not self.biases:
            raise Refused(
                f"{type(decoder).__name__} cannot be hosted exactly: its positions come neither from a table "
                "(embed_positions) nor as biases by distance (T5's)"
            )

    def refresh(self, count: int, device: torch.device) -> None:
        """Read the first `count` entries of the table, as the decoder itself looks them up."""
        if self.embedding is None:
            return
        self._table, blank = self._looked_up(count, self._pad + 1, device), self._looked_up(1, self._pad, device)
        self._blank: Tensor | None = None if torch.equal(blank, self._table[:1]) else blank  # M2M100: padding has none

    def _looked_up(self, count: int, token: int, device: torch.device) -> Tensor:
        assert self.embedding is not None
        ids = torch.full((1, count), token, device=device)
        takes = next(iter(inspect.signature(self.embedding.forward).parameters))
        return self.embedding(ids.shape if takes == "input_ids_shape" else ids).reshape(count, -1)

    @contextmanager
    def at(self, ids: Tensor, positions: Tensor, places: Tensor) -> Iterator[None]:
        """A pass over nodes `ids` at `positions`, (rows, width), that sees cached places at `places`, (rows, view)."""
        changed: list[tuple[nn.Module, str]] = []
        try:
            if self.embedding is not None:
                here = self._table[positions]
                if self._blank is not None:
                    here = torch.where((ids == self._pad)[:, :, None], self._blank, here)
                self.embedding.forward = lambda *args, **kwargs: here
                changed.append((self.embedding, "forward"))
            for module in self.biases:
                bias = _bias(module, positions, places)
                module.compute_bias = lambda *args, _bias=bias, **kwargs: _bias
                changed.append((module, "compute_bias"))
            yield
        finally:
            for module, name in changed:
                delattr(module, name)


def _bias(module: Any, positions: Tensor, places: Tensor) -> Tensor:
    """(rows, heads, width, view)."""
    distance, known = (
        places[:, None] - positions[:, :, None],
        {
            "bidirectional": not module.is_decoder,
            "num_buckets": module.relative_attention_num_buckets,
            "max_distance": module.relative_attention_max_distance,
        },
    )
    takes = inspect.signature(module._relative_position_bucket).parameters  # not all kin of T5 take them
    bucket = module._relative_position_bucket(distance, **{name: known[name] for name in known if name in takes})
    return module.relative_attention_bias(bucket).permute(0, 3, 1, 2)
