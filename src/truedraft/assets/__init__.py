"""Data of the package: embedded models, each a folder in the format of transformers, and the demo's prompts."""

from __future__ import annotations

import difflib
from pathlib import Path

from truedraft.errors import Refused

ROOT = Path(__file__).parent
DRAFTS = {"nano": "nano-draft"}  # embedded model -> its draft model
DIFFUSION = {"nano": "nano-diffusion"}  # embedded model -> a diffusion model that may draft for it
HEADS = {"eagle3": "nano-eagle3", "medusa": "nano-medusa"}  # method -> its embedded head, for nano


def names() -> list[str]:
    """Names of the embedded models, sorted."""
    return sorted(folder.name for folder in ROOT.iterdir() if (folder / "config.json").is_file())


def path(name: str) -> Path:
    """The folder of an embedded model.

    Raises:
        Refused: no such model; the message gives the nearest name.
    """
    available = names()
    if name in available:
        return ROOT / name
    near = difflib.get_close_matches(name, available, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(available) or 'none'}"
    raise Refused(f"there is no embedded model {name!r}: {hint}")


def head(method: str, model: str | None) -> Path | None:
    """The folder of the embedded head of a method for an embedded model, None where there is none.

    model: the folder that the model was loaded from, if any.
    """
    return ROOT / HEADS[method] if method in HEADS and Path(model or "") == ROOT / "nano" else None


def prompt(name: str) -> str:
    """The text of one of the demo's prompts, without its final newline."""
    return (ROOT / "prompts" / name).read_text(encoding="utf-8").removesuffix("\n")


def edit_prompt(text: str, instruction: str) -> str:
    """An editing task in the format that `nano` was trained on."""
    return f"<|edit|>{instruction}\n{text}<|result|>"
