"""Substitutes the positions of a tree's nodes in decoders that derive positions from indices in the cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.errors import Refused
from truedraft.runtime.overrides import Override, overridden
from truedraft.runtime.padded import Padded


class Positions:
    """Within a block, a decoder uses given positions; outside of it, it is unchanged.

    Supported are tables of positions (`embed_positions`: BART, Marian, Pegasus, M2M100, Whisper) and biases by distance
    (`compute_bias`: T5 and models derived from it). A decoder without either that takes positions as an argument is
    left as it is.

    given: whether it takes them so.

    Raises:
        Refused: it has none of these.
    """

    def __init__(self, decoder: nn.Module, pad: int):
        self.embedding: nn.Module | None = getattr(decoder, "embed_positions", None)
        self.biases: list[Any] = [
            m
            for m in decoder.modules()
            if hasattr(m, "compute_bias") and getattr(m, "has_relative_attention_bias", False)
        ]
        self.pad, self._dtype = pad, next(decoder.parameters()).dtype
        own = self.embedding is not None or bool(self.biases)
        self.given = not own and "position_ids" in inspect.signature(decoder.forward).parameters
        if not own and not self.given:
            raise Refused(
                f"{type(decoder).__name__} cannot be hosted exactly: its positions come neither from a table "
                "(embed_positions) nor as biases by distance (T5's), and are no argument of its forward"
            )

    @classmethod
    def of(cls, model: PreTrainedModel) -> Positions:
        """Those of a model's decoder."""
        return cls(model.get_decoder(), model.config.pad_token_id or 0)

    def refresh(self, count: int, device: torch.device) -> None:
        """Read the first `count` entries of the table through the decoder's own lookup."""
        if (table := self.table(count, device)) is not None:
            self._table, self._blank = table

    def table(self, count: int, device: torch.device) -> tuple[Tensor, Tensor | None] | None:
        """The embeddings of the first `count` positions, (count, H), and that of padding, (1, H), if it differs from
        the first; None where there is no table."""
        if self.embedding is None:
            return None
        if isinstance(self.embedding, nn.Embedding):
            count = min(count, _size(self.embedding))
        rows, blank = self._looked_up(count, self.pad + 1, device), self._looked_up(1, self.pad, device)
        return rows, None if torch.equal(blank, rows[:1]) else blank  # M2M100: zeros for padding

    def counted(self, ids: Tensor) -> Tensor:
        """The positions of the tokens of whole texts, (rows, length); some models do not count padding."""
        if self.embedding is not None and self.table(1, ids.device)[1] is not None:  # type: ignore[index]
            return ((ids != self.pad).cumsum(1) - 1).clamp_min(0)
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def _looked_up(self, count: int, token: int, device: torch.device) -> Tensor:
        assert self.embedding is not None
        ids = torch.full((1, count), token, device=device)
        _, argument, *_ = inspect.signature(type(self.embedding).forward).parameters
        given: Any = {"input_ids_shape": ids.shape, "inputs_embeds": ids[:, :, None].to(self._dtype)}.get(argument, ids)
        return self.embedding(given).reshape(count, -1)

    @contextmanager
    def at(self, nodes: Padded, extent: int) -> Iterator[None]:
        """A pass over nodes that attend to the first `extent` positions of their rows."""
        ids, positions = nodes.ids, nodes.positions
        overrides: list[Override] = []
        if self.embedding is not None:
            here = self._table[positions]
            if self._blank is not None:
                here = torch.where((ids == self.pad)[:, :, None], self._blank, here)
            overrides.append((self.embedding, "forward", lambda *args, **kwargs: here))
        for module in self.biases:
            bias = _biases(module, nodes.placed(extent)[:, None] - positions[:, :, None]).permute(0, 3, 1, 2)
            overrides.append((module, "compute_bias", lambda *args, _bias=bias, **kwargs: _bias))
        with overridden(overrides):
            yield


def has_table(model: PreTrainedModel) -> bool:
    """Whether a model's decoder adds positions from a table."""
    return hasattr(model.get_decoder(), "embed_positions")


def table_size(stack: Any) -> int | None:
    """Size of an encoder's or a decoder's table of positions; None where it uses distances, or grows the table."""
    table = getattr(stack, "embed_positions", None)
    return _size(table) if isinstance(table, nn.Embedding) else None


def _size(table: nn.Embedding) -> int:
    return table.num_embeddings - int(getattr(table, "offset", 0))


def by_distance(module: Any, first: int, last: int) -> Tensor:
    """Biases of attending `first` to `last` - 1 positions back, (heads, last - first), fp32."""
    back = torch.arange(first, last, device=module.relative_attention_bias.weight.device)
    return _biases(module, -back).float().T.contiguous()


def _biases(module: Any, distance: Tensor) -> Tensor:
    """Biases of the distances between nodes and what they attend to, (..., heads)."""
    options = {
        "bidirectional": not module.is_decoder,
        "num_buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
    }
    accepted = inspect.signature(module._relative_position_bucket).parameters  # not all variants of T5 have all of them
    given = {name: value for name, value in options.items() if name in accepted}
    bucket = module._relative_position_bucket(distance, **given)
    return module.relative_attention_bias(bucket)
