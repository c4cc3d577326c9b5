"""The memory plan of a server: that of its model with every drafter that requests may name (`planning/`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from truedraft import loading
from truedraft.caches import pages
from truedraft.caches.pool import units
from truedraft.continuous import DRAFTS
from truedraft.errors import Refused
from truedraft.layout import labelled
from truedraft.planning.models import sized
from truedraft.planning.parts import Part, by_device, size
from truedraft.planning.plan import Setup, most
from truedraft.registry import NONE
from truedraft.serve.config import ServeConfig
from truedraft.targets.memory import free_memory, spare_memory

KV = "KV cache"  # the name of its part
SHORT = 4096  # tokens of a row, for which it is told how many fit


@dataclass(frozen=True)
class Planned:
    """What a server needs, and what fits.

    parts: of the memory; the KV cache is what is left for it, or what all rows fill.
    row: bytes of the KV cache of one row as long as it may be. rows: tokens of a row -> rows that fit at once.
    there: by device, the bytes that may be in use beside what is used now.
    """

    parts: list[Part]
    row: int
    rows: dict[int, int]
    there: dict[str, int]


def planned(config: ServeConfig) -> Planned:
    """The memory that a server needs.

    Raises:
        Refused: there is no such model, or a drafter lacks its draft model or head.
    """
    target = sized(config.model, config.dtype, config.quantize, config.stretched)
    target.once = config.release_weights
    length = config.max_model_len or getattr(target.config, "max_position_embeddings", None) or 4096
    text, home = loading.kind_of(target.source) == "text", str(target.device)
    setups = [Setup(target, draft, _free, DRAFTS) for draft in (config.drafts if text else (NONE,))]
    shared = text and (target.device.type != "cpu" or pages.available())

    def cache(tokens: int) -> int:
        return target.cache(1, units(tokens + DRAFTS) if shared else tokens + DRAFTS)

    def left(rows: int) -> int:
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        return there[home] - by_device(_beside(config, setups, length, rows))[home]

    there = {part.device: _spare(part.device, config) for part in _beside(config, setups, length, 1)}
    row = cache(length)
    longest = most(lambda rows: rows * row <= left(rows), config.max_rows) or 1
    whole, room = config.max_rows * row + config.prefix_bytes * text, max(left(longest), row)
    rows = {tokens: min(room // cache(tokens), config.max_rows) for tokens in sorted({min(SHORT, length), length})}
    fit = " or ".join(f"{count} rows of {tokens:,} tokens" for tokens, count in rows.items())
    of = f"shared by rows and prefixes: {fit} at once" if text else f"{config.max_rows} rows of {length:,} tokens"
    kv = Part(KV, min(whole, room) if shared else whole, of, known="at most", device=home)
    return Planned([*_beside(config, setups, length, longest), kv], row, rows, there)


def _beside(config: ServeConfig, setups: list[Setup], length: int, longest: int) -> list[Part]:
    """The parts but the target's KV cache.

    length: tokens of a row at most. longest: how many rows are so long at once, in what drafters keep of them.
    """
    widest = max(setups, key=lambda setup: setup.width)
    parts = [part for part in widest.of_target(widest.load(config.max_rows, length)) if part.name != KV]
    if config.train is not None:
        again = sized(config.model, "auto", None, None).weights
        parts.append(Part("training", again, "weights once more, in a process; more while it runs", known="estimate"))
    load = widest.load(longest, length)
    return parts + [part for setup in setups for part in setup.of_drafter(load)]


def described(plan: Planned) -> str:
    """The plan as text."""
    lines = [(part.name, f"{size(part.bytes)}: {part.of}" + _remark(part)) for part in plan.parts]
    for device, needed in by_device(plan.parts).items():
        lines.append(("together", f"{size(needed)} at once on {device}; {size(plan.there[device])} may be used"))
    return labelled(lines, width=100)


def check_fits(plan: Planned, config: ServeConfig) -> None:
    """Raises Refused where the parts do not fit in the memory that may be used."""
    for device, needed in by_device(plan.parts).items():
        if (lack := needed - plan.there[device]) > 0:
            raise Refused(
                f"max_model_len={config.max_model_len}, max_rows={config.max_rows}, memory_utilization="
                f"{config.memory_utilization:g}: {size(lack)} more than may be used on {device}: lower max_model_len "
                "or max_rows, raise memory_utilization, or quantize"
            )
    if (given := config.kv_cache_memory_bytes) is not None and given < plan.row:
        raise Refused(
            f"kv_cache_memory_bytes={size(given)} is less than the {size(plan.row)} of one row: raise it, or lower "
            "max_model_len"
        )


def _remark(part: Part) -> str:
    return {"exact": "", "unknown": " (not counted)"}.get(part.known, f" ({part.known})")


def _spare(device: str, config: ServeConfig) -> int:
    return spare_memory(torch.device(device), config.memory_utilization)


def _free(device: str) -> int:
    return free_memory(torch.device(device))
