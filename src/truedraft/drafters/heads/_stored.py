"""Some of the weights of a model's own checkpoint: a folder or a name on the hub, in one file or in many."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from truedraft.errors import Refused, why


def stored(name: str, source: str, pattern: re.Pattern[str]) -> dict[str, Tensor]:
    """The weights of a checkpoint whose whole names match a pattern; only files that have some are read.

    Args:
        name: of the method, for messages.
        source: a folder, or a name on the hub.

    Raises:
        Refused: there are no safetensors files there, or they cannot be read.
    """
    try:
        return _matching(source, pattern)
    except FileNotFoundError:
        reason = f"there is no {SAFE_WEIGHTS_NAME} in {source!r}"
    except Exception as e:  # damaged files and the hub's client raise any exception
        reason = f"the weights in {source!r} cannot be read: {' '.join(why(e).split())[:200]}"
    raise Refused(f"{name}: {reason}: give the folder of a checkpoint with safetensors files, {name}:FOLDER")


def _matching(source: str, pattern: re.Pattern[str]) -> dict[str, Tensor]:
    index = _found(source, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        files = {SAFE_WEIGHTS_NAME}
    else:
        names: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        files = {file for weight, file in names.items() if pattern.fullmatch(weight)}
    weights: dict[str, Tensor] = {}
    for file in sorted(files):
        path = _found(source, file)
        if path is None:
            raise FileNotFoundError(file)
        with safe_open(path, framework="pt") as opened:
            weights |= {n: opened.get_tensor(n) for n in opened.keys() if pattern.fullmatch(n)}  # noqa: SIM118
    return weights


def _found(source: str, file: str) -> Path | None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).exists() else None
    path = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)
