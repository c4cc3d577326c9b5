"""A cache whose rows share the memory that there is (`caches/pool.py`)."""

from __future__ import annotations

from truedraft.caches.pool import units
from truedraft.errors import NoRoom, Refused
from truedraft.targets._base import Target

UTILIZATION = 0.8  # share of a device's memory that may be in use; passes, drafters and other programs need some


def check_memory(kv_cache_memory_bytes: int | None, memory_utilization: float) -> None:
    """Raises Refused where one of them is of another type or out of range."""
    given, share = kv_cache_memory_bytes, memory_utilization
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise Refused(f"kv_cache_memory_bytes={given!r}: give a number of bytes, or None")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise Refused(f"memory_utilization={share!r}: give a share of the memory above 0, and 1 at most")


def reserved(
    target: Target, rows: int, tokens: int, positions: int, prefix_bytes: int, kv_cache_memory_bytes: int | None,
    utilization: float,
) -> tuple[int, int]:  # fmt: skip
    """Reserve a cache of so many rows, or of as many as fit where slots take all of their memory from the start.

    Args:
        tokens: most of a row. positions: with those of a draft. prefix_bytes: most of stored prefixes.

    Returns:
        The number of rows, and the most bytes that they and prefixes may have in all.

    Raises:
        NoRoom: not even one row fits.
    """
    paged = target.paged
    if paged:
        target.reserve(rows, positions, shared=True)
    row = units(positions) * target.position_bytes
    there = target.spare_memory(utilization, row)
    limit = there if kv_cache_memory_bytes is None else kv_cache_memory_bytes
    if limit < row or limit > there:
        target.free()
        raise NoRoom(lack(tokens, row, there, kv_cache_memory_bytes, utilization))
    if not paged:
        rows = min(rows, limit // row)
        target.reserve(rows, positions)
    return rows, min(limit, rows * row + prefix_bytes)


def lack(tokens: int, row: int, there: int, kv_cache_memory_bytes: int | None, utilization: float) -> str:
    """The sentence for a pool that is too small for a row, or larger than the memory."""
    by_share = f"memory_utilization={utilization:g} leaves {max(there, 0):,}"
    if kv_cache_memory_bytes is not None and kv_cache_memory_bytes > there:
        return f"kv_cache_memory_bytes={kv_cache_memory_bytes:,}: {by_share}: lower one, or raise the other"
    found = by_share if kv_cache_memory_bytes is None else f"kv_cache_memory_bytes={kv_cache_memory_bytes:,}"
    return (
        f"a row of {tokens:,} tokens, with a draft behind it, needs {row:,} bytes of KV cache, and {found}: lower "
        "max_tokens (--max-model-len of a server), raise memory_utilization or kv_cache_memory_bytes, or quantize"
    )
