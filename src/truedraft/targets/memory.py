"""Checks that keys and values fit in free memory."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from truedraft.caches.states import STATE_LAYERS, layer_kinds
from truedraft.errors import NoRoom
from truedraft.runtime.weights import Copies


def check_room(
    config: Any, layers: int, rows: int, capacity: int, dtype: torch.dtype, device: torch.device,
    remedy: str = "lower max_new_tokens or the batch size", beside: int = 0, copies: Copies | None = None,
) -> None:  # fmt: skip
    """Raises NoRoom where keys and values of that many rows and positions, and `beside` bytes, do not fit in free
    memory, nor in that of `copies` too."""
    need, free = cache_bytes(config, layers, rows, capacity, dtype) + beside, free_memory(device)
    if need > free and need > free + (copies.bytes if copies else 0):
        of = f"{rows} rows x {capacity} positions" + (f" with {beside:,} bytes of prefixes" if beside else "")
        raise NoRoom(f"the KV cache of {of} needs {need:,} bytes, {free:,} are free: {remedy}")


def cached_layers(config: Any) -> int:
    """Number of layers with keys and values."""
    kinds = layer_kinds(config)
    return len(kinds) - sum(kind in STATE_LAYERS or kind == "dummy" for kind in kinds)


def cache_bytes(config: Any, layers: int, rows: int, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of that many rows and positions."""
    of_layers = (
        list(config.per_layer_config)[:layers] if getattr(config, "is_heterogeneous", False) else [config] * layers
    )
    return 2 * rows * capacity * sum(map(_numbers_in_keys, of_layers)) * dtype.itemsize


def _numbers_in_keys(config: Any) -> int:
    """Numbers in the keys of one position in a layer."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def free_memory(device: torch.device) -> int:
    """Bytes available to tensors on a device, including those that torch has reserved."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
