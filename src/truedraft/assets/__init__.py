"""What ships with the package: embedded models, each a folder in the format of transformers, and the demo's prompts."""

from __future__ import annotations

import difflib
from pathlib import Path

from truedraft.errors import Refused

ROOT = Path(__file__).parent
DRAFTS = {"nano": "nano-draft"}  # embedded model -> the one that drafts for it


def names() -> list[str]:
    """Names of the embedded models, sorted."""
    return sorted(folder.name for folder in ROOT.iterdir() if (folder / "config.json").is_file())


def path(name: str) -> Path:
    """The folder of an embedded model.

    Raises:
        Refused: no such model; the nearest name is offered.
    """
    known = names()
    if name in known:
        return ROOT / name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
    raise Refused(f"there is no embedded model {name!r}: {hint}")


def prompt(name: str) -> str:
    """The text of one of the demo's prompts, without its final newline."""
    return (ROOT / "prompts" / name).read_text(encoding="utf-8").removesuffix("\n")


def edit_prompt(text: str, instruction: str) -> str:
    """An editing task as `nano` has learnt to read it."""
    return f"<|edit|>{instruction}\n{text}<|result|>"
