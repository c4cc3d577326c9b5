"""Folders that have only an adapter of PEFT: its weights, and the name of the model that they belong to."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from truedraft.errors import Refused

CONFIG = "adapter_config.json"
WHOLE = ("model*.safetensors", "pytorch_model*.bin")  # weights of a model, beside which an adapter is something else


def is_adapter(source: Path | str) -> bool:
    """Whether it is a folder with an adapter, and without a model."""
    if not (isinstance(source, Path) and (source / CONFIG).is_file()):
        return False
    return not any(found for name in WHOLE for found in source.glob(name))


def base_of(folder: Path, adapter: str) -> str:
    """The name of the model that an adapter belongs to; a folder may be named from the adapter's own on.

    Args:
        adapter: how messages name it.

    Raises:
        Refused: it names none, or itself.
    """
    try:
        found = json.loads((folder / CONFIG).read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError) as e:
        raise Refused(f"{adapter} is an adapter of PEFT whose {CONFIG} is no JSON object: download it again") from e
    if not isinstance(found, str) or not found:
        raise Refused(
            f"{adapter} is an adapter of PEFT that names no model: set base_model_name_or_path in its {CONFIG}"
        )
    beside = folder / found
    base = str(beside) if not Path(found).expanduser().exists() and beside.exists() else found
    if Path(base).expanduser().resolve() == folder.resolve():
        raise Refused(f"{adapter} is an adapter of PEFT that names itself: set base_model_name_or_path in its {CONFIG}")
    return base


def check_installed(adapter: str) -> None:
    """Raises Refused where PEFT is not installed."""
    if find_spec("peft") is None:
        raise Refused(f"{adapter} is an adapter of PEFT, which is not installed: pip install peft")
