"""Tables of the server's page: its settings, and what becomes of each parameter of a request."""

from __future__ import annotations

import dataclasses
from typing import Any

from truedraft.serve.config import ServeConfig
from truedraft.serve.protocol import NO_EFFECT, REFUSED, ChatBody, CompletionBody

GROUPS = {
    "model": "the model", "draft": "drafting", "threads": "capacity", "host": "the socket",
    "max_body_bytes": "bounds of a request", "shutdown_seconds": "operation",
}  # fmt: skip  # first setting of a group -> its heading


def settings() -> list[str]:
    """Every setting of `truedraft serve`, by group."""
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    for each in dataclasses.fields(ServeConfig):
        if each.name in GROUPS:
            lines.append(f"| **{GROUPS[each.name]}** | | |")
        lines.append(f"| `{each.name}` | {_default(each)} | {each.metadata['help'].rstrip('.')} |")
    return lines


def _default(each: dataclasses.Field[Any]) -> str:
    value = each.default
    if value in (dataclasses.MISSING, None, "", ()):
        return ""
    if each.name.endswith("_bytes") and isinstance(value, int):
        return f"{value >> 20}M" if value >= 1 << 20 else f"{value >> 10}K"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value}"


def parameters() -> list[str]:
    """What becomes of each parameter."""
    both = [name for name in CompletionBody.model_fields if name in ChatBody.model_fields]
    kinds = {
        "completions and chat": both,
        "completions": [name for name in CompletionBody.model_fields if name not in both],
        "chat": [name for name in ChatBody.model_fields if name not in both],
    }
    lines = ["| honoured in | parameters |", "|---|---|"]
    lines += [f"| {kind} | {', '.join(f'`{name}`' for name in names)} |" for kind, names in kinds.items()]
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    lines += ["", "| without effect | why |", "|---|---|"]
    return lines + [f"| `{name}` | {reason} |" for name, reason in NO_EFFECT.items()]
