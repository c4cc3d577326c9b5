"""What a method says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Guarantee = Literal["tokens", "distribution", "none"]


@dataclass(frozen=True)
class Card:
    """A method in the words of its file; listings, documentation and tests are derived from it.

    paper: the source, with year.
    idea: one sentence that a newcomer understands.
    family: the shelf it stands on (retrieval, draft model, heads, ...).
    needs: what must be given beyond the target ("references", "weights", "training").
    cannot: target family -> why it cannot be served.
    presets: name -> knobs, for published variants.
    published: the paper's own figures.
    measured: figures of this project, with machine and workload, the unfavourable ones included.
    """

    paper: str
    idea: str
    family: str
    needs: tuple[str, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published: str = ""
    measured: str = ""
