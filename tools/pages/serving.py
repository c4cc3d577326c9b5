"""Tables of the server's page: its settings, and what becomes of each parameter of a request."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from truedraft.serve.config import ServeConfig
from truedraft.serve.peers import ABSENT, ABSENT_IN_CHAT, REASONING, SPELLED, Absent
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
    lines += [f"| {kind} | {_listed(names)} |" for kind, names in kinds.items()]
    lines += ["", "| refused | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    lines += ["", "| without effect | why |", "|---|---|"]
    lines += [f"| {_listed(names)} | {reason} |" for reason, names in _inverted(NO_EFFECT).items()]
    lines += ["", "| other name | means |", "|---|---|"]
    lines += [f"| {_listed(names)} | `{target}` |" for target, names in _inverted(SPELLED).items()]
    lines += [f"| {_listed(REASONING)} | `reasoning_effort` or `enable_thinking`, by its value |"]
    lines += ["", "| of other servers, accepted at | at other values refused |", "|---|---|"]
    lines += [f"| {_listed(names)} | {remedy} |" for remedy, names in _neutral(ABSENT).items()]
    chat = _neutral(ABSENT_IN_CHAT).items()
    return lines + [f"| {_listed(names)}, in chat | {remedy} |" for remedy, names in chat]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _inverted(table: dict[str, str]) -> dict[str, list[str]]:
    """What a table says -> the names about which it says so."""
    return {text: [name for name, other in table.items() if other == text] for text in table.values()}


def _neutral(absent: dict[str, Absent]) -> dict[str, list[str]]:
    """Remedy -> names, with the values that ask for nothing, for all but null."""
    shown = {
        name: name + "".join(f"={json.dumps(value)}" for value in each.neutral[:1]) for name, each in absent.items()
    }
    return {
        each.remedy: [shown[name] for name, other in absent.items() if other.remedy == each.remedy]
        for each in absent.values()
    }
