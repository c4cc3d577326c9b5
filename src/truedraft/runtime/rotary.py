"""Rotary frequencies that change with the length of a text: in passes over several rows each has those of its own.

`transformers` chooses them by the largest position of a call. LongRoPE (Ding et al., 2024, arXiv 2402.13753) has one
set up to the length of its first training and another beyond; dynamic NTK scaling a new one for every length beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from truedraft.runtime.overrides import overridden, own

CHANGING = ("dynamic", "longrope")  # kinds of rotary scaling


def changes(module: nn.Module) -> bool:
    """Whether a module computes rotary embeddings with such frequencies, which it keeps from call to call."""
    kind = vars(module).get("rope_type")
    return any(k in CHANGING for k in (kind.values() if isinstance(kind, dict) else [kind]))


def by_row(modules: list[nn.Module], reach: int | None = None) -> AbstractContextManager[None]:
    """Within the block, the modules choose the frequencies of each row alone.

    reach: length of the texts, where a call reads only a part of them; by default they end with the call.
    """
    return overridden((module, "forward", _by_row(module, reach)) for module in modules)


def _by_row(module: nn.Module, reach: int | None) -> Any:
    def embed(x: Tensor, position_ids: Tensor, *given: Any, **options: Any) -> Any:
        width = position_ids.shape[1]
        if reach is not None:  # one more position that is not used
            last = position_ids.new_full((len(position_ids), 1), reach - 1)
            position_ids = torch.cat((position_ids, last), 1)
        rows = [own(module, "forward")(x, row[None], *given, **options) for row in position_ids]
        return _joined(rows, width)

    return embed


def _joined(rows: Sequence[Any], width: int) -> Any:
    """The embeddings of rows, (1, positions, ...) each, or tuples of them, as one of the first `width` positions."""
    if isinstance(rows[0], tuple):
        return tuple(_joined(parts, width) for parts in zip(*rows, strict=True))
    return torch.cat(list(rows))[:, :width]
