"""A picture of a training run: tokens per pass, acceptance by position, and the loss, over its minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from truedraft.bench.plots import Panel, picture


def drawn(rows: Sequence[dict[str, Any]]) -> str:
    """The figures of all validations as an SVG document."""
    minutes = [f"{row['minutes']:g}" for row in rows]
    losses = [(at, row["loss"]) for at, row in zip(minutes, rows, strict=True) if "loss" in row]
    panels = [
        Panel("tokens per pass", [("held out", [row["tokens_per_pass"] for row in rows])], ticks=minutes),
        Panel("loss", [("training", [max(loss, 0.0) for _, loss in losses])], ticks=[at for at, _ in losses]),
    ]
    acceptance = [row.get("acceptance", []) for row in rows]
    if positions := min(map(len, acceptance)):
        lines = [(f"position {k + 1}", [rates[k] for rates in acceptance]) for k in range(positions)]
        panels.insert(1, Panel("acceptance by position", lines, ticks=minutes, top=1.0, value=lambda v: f"{v:.0%}"))
    return picture(panels, "minutes of training")
