"""The memory plan of a server: that of its model with every drafter that requests may name (`planning/`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from truedraft import loading
from truedraft.continuous import DRAFTS
from truedraft.errors import Refused
from truedraft.layout import labelled
from truedraft.planning.models import sized
from truedraft.planning.parts import Part, by_device, size
from truedraft.planning.plan import Setup
from truedraft.registry import NONE
from truedraft.serve.config import ServeConfig
from truedraft.targets.memory import free_memory


def planned(config: ServeConfig) -> list[Part]:
    """The parts of the memory that a server needs.

    Raises:
        Refused: there is no such model, or a drafter lacks its draft model or head.
    """
    target = sized(config.model, config.dtype, config.quantize, config.stretched)
    length = config.max_model_len or getattr(target.config, "max_position_embeddings", None) or 4096
    text = loading.kind_of(target.source) == "text"
    setups = [Setup(target, draft, _free, DRAFTS) for draft in (config.drafts if text else (NONE,))]
    widest = max(setups, key=lambda setup: setup.width)
    load = widest.load(config.max_rows, length)
    parts = widest.of_target(load)
    if config.prefix_bytes:
        prefixes = Part("prefixes", config.prefix_bytes, "prefix_bytes", known="at most", device=str(target.device))
        parts.append(prefixes)
    if config.train is not None:
        again = sized(config.model, "auto", None, None).weights
        parts.append(Part("training", again, "weights once more, in a process; more while it runs", known="estimate"))
    return parts + [part for setup in setups for part in setup.of_drafter(load)]


def described(parts: Sequence[Part]) -> str:
    """The plan as text."""
    lines = [(part.name, f"{size(part.bytes)}: {part.of}" + _remark(part)) for part in parts]
    for device, needed in by_device(parts).items():
        lines.append(("together", f"{size(needed)} at once on {device}; {size(_free(device))} are free"))
    return labelled(lines, width=100)


def _remark(part: Part) -> str:
    return {"exact": "", "unknown": " (not counted)"}.get(part.known, f" ({part.known})")


def check_fits(parts: Sequence[Part], config: ServeConfig) -> None:
    """Raises Refused where the parts do not fit in free memory."""
    for device, needed in by_device(parts).items():
        if (lack := needed - _free(device)) > 0:
            raise Refused(
                f"max_rows={config.max_rows}, max_model_len={config.max_model_len}: {size(lack)} more than there is on "
                f"{device}: lower max_rows, max_model_len or prefix_bytes, or quantize"
            )


def _free(device: str) -> int:
    return free_memory(torch.device(device))
