"""Gives up the weights of a model that compiled passes read copies of (`released.py`, which needs torchao)."""

from __future__ import annotations

from torch import nn

from truedraft.errors import Refused


def released(model: nn.Module) -> None:
    """Keep the weights of a model's linear layers in panels alone.

    Raises:
        Refused: torchao is not installed.
    """
    try:
        from truedraft.runtime.released import release_weights
    except ImportError as e:
        raise Refused("release_weights=True needs torchao: pip install 'truedraft[quantize]'") from e
    release_weights(model)
