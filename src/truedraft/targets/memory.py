"""Checks that keys and values fit in free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from truedraft.caches.states import STATE_LAYERS, layer_kinds
from truedraft.errors import NoRoom
from truedraft.runtime.weights import Copies

UNLIMITED = 1 << 62  # bytes, where there is no limit
CONTAINER = Path("/sys/fs/cgroup")  # what the system says of the container of this process


def check_room(
    config: Any, layers: int, rows: int, capacity: int, dtype: torch.dtype, device: torch.device,
    remedy: str = "lower max_new_tokens or the batch size", copies: Copies | None = None,
) -> None:  # fmt: skip
    """Raises NoRoom where keys and values of that many rows and positions do not fit in free memory, nor in that of
    `copies` too."""
    need, free = cache_bytes(config, layers, rows, capacity, dtype), free_memory(device)
    if need > free and need > free + (copies.bytes if copies else 0):
        of = f"{rows} rows x {capacity} positions"
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
    """Bytes available to tensors on a device, including those that torch has reserved; of the CPU's no more than the
    container may still take."""
    if device.type != "cuda":
        return min(psutil.virtual_memory().available, _of_container()[1])
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def spare_memory(device: torch.device, utilization: float) -> int:
    """Bytes available to tensors on a device while no more than a share of its memory is in use, by whatever; negative
    where more is."""
    if device.type != "cuda":
        total = min(psutil.virtual_memory().total, _of_container()[0])
    else:
        total = torch.cuda.mem_get_info(device)[1]
    return free_memory(device) - round((1 - utilization) * total)


def _of_container() -> tuple[int, int]:
    """Bytes that the container of this process may use (cgroup), and those of them that are left; without a limit, both
    are larger than any memory."""
    try:
        limit, used = (CONTAINER / "memory.max").read_text().strip(), int((CONTAINER / "memory.current").read_text())
        stat = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        most = UNLIMITED if limit == "max" else int(limit)
    except (OSError, ValueError):
        return UNLIMITED, UNLIMITED
    return most, most - used + int(stat.get("inactive_file", 0))  # which the kernel drops first
