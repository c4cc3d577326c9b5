"""The state of a training run in a file beside its checkpoint, from which it is continued."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from truedraft.errors import Refused, why
from truedraft.files import whole

MODEL, CONFIG = "model.safetensors", "config.json"  # of a whole model
LOG = "log.jsonl"  # of a run, in its folder
STATE = "training.pt"  # file name in a checkpoint's folder
VERSION = 1


def check_fresh(folder: Path, checkpoint: str) -> None:
    """Raises Refused where a folder has a checkpoint, or a model, that a training would replace. checkpoint: the file
    name of the weights."""
    for name in (checkpoint, *([CONFIG] if checkpoint == MODEL else ())):
        if (folder / name).exists():
            ours = "go on from it with --resume, or give another folder"
            theirs = "it was not trained there, so give another folder"
            advice = ours if any((folder / one).exists() for one in (STATE, LOG)) else theirs
            raise Refused(f"--out: {str(folder)!r} holds a checkpoint: {advice}")


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write a state of tensors, numbers, text, lists and dictionaries, whole or not at all.

    Raises:
        OSError: it cannot be written; an earlier state is kept.
    """
    packed = io.BytesIO()
    torch.save({"format": "truedraft training", "version": VERSION, **state}, packed)
    with whole(folder / STATE) as file:
        file.write(packed.getbuffer())


def read_state(folder: Path) -> dict[str, Any] | None:
    """The state in a folder, on the CPU; None where there is none.

    Raises:
        Refused: it is damaged, or of another version.
    """
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = state["format"], state["version"]
    except Exception as e:  # a damaged file makes the unpickler raise any exception
        reason = " ".join(why(e).split())[:200]
        raise Refused(
            f"--resume: {str(path)!r} is damaged ({reason}): remove it to go on from the weights alone"
        ) from e
    if found != ("truedraft training", VERSION):
        raise Refused(f"--resume: {str(path)!r} is of another version: remove it to go on from the weights alone")
    return state
