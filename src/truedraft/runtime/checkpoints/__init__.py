"""Quantised checkpoints of others, read as they are: their integers become the weights of linear layers."""

from __future__ import annotations

import json
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.errors import Note, Refused

if TYPE_CHECKING:
    from truedraft.runtime.checkpoints._base import Checkpoint

FOLDERS = {"gptq": "gptq.Gptq", "awq": "awq.Awq", "compressed-tensors": "compressed_tensors.CompressedTensors"}
ENDING = ".gguf"
OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # files of what config.json has today


def place(source: Path | str) -> tuple[Path | str, dict[str, Any]]:
    """Where `transformers` reads a model, and with which options: a file of GGUF is one of its folder.

    Raises:
        Refused: it is such a file, and the package that reads it is not installed.
    """
    options: dict[str, Any] = {"local_files_only": isinstance(source, Path)}
    if not (isinstance(source, Path) and is_gguf(source)):
        return source, options
    _check_installed("gguf", f"{str(source)!r}")
    return source.parent, {**options, "gguf_file": source.name}


def parsed(source: Path | str) -> AbstractContextManager[None]:
    """A block within which the metadata of a source is parsed once, where it is a file of GGUF."""
    if not (isinstance(source, Path) and is_gguf(source)):
        return nullcontext()
    from truedraft.runtime.checkpoints._reading import parsed_once

    return parsed_once(source)


def is_gguf(path: Path) -> bool:
    return path.suffix == ENDING and path.is_file()


def is_quantised(source: Path | str, config: Any) -> bool:
    """Whether a model is one of the formats that are read here."""
    return (isinstance(source, Path) and is_gguf(source)) or _method(config) in FOLDERS


def complete(source: Path | str, config: Any) -> None:
    """Give a configuration the settings of quantisation that older tools have written into a file of their own.

    Raises:
        Refused: the file is no JSON object.
    """
    if getattr(config, "quantization_config", None) is not None or (isinstance(source, Path) and is_gguf(source)):
        return
    from transformers.utils.hub import cached_file

    for file, method in OLDER.items():
        options: dict[str, Any] = {"local_files_only": isinstance(source, Path)}
        if path := cached_file(source, file, _raise_exceptions_for_missing_entries=False, **options):
            try:
                config.quantization_config = {"quant_method": method, **json.loads(Path(path).read_bytes())}
            except (ValueError, TypeError) as e:
                raise Refused(f"{path} is no JSON object: download it again") from e
            return


def opened(source: Path | str, config: Any, model: str) -> Checkpoint | None:
    """The quantised checkpoint of a folder, a file of GGUF or a name on the hub; None where it is not read here.

    Args:
        config: what `transformers` read; where there is a checkpoint it is that of the plain model from then on.
        model: how messages name it.

    Raises:
        Refused: the format has something that is not supported, or a package is not installed.
    """
    if not is_quantised(source, config):
        return None
    _check_installed("torchao", model)
    if (method := _method(config)) not in FOLDERS:
        from truedraft.runtime.checkpoints.gguf import Gguf

        file = Gguf(Path(source), config, model)
        if file.stays_packed:
            return file
        text = f"{model}: transformers reads matrices of this architecture into plain weights, which take more memory"
        warnings.warn(text, Note, stacklevel=3)
        return None
    from truedraft.runtime.checkpoints._base import Files

    module, _, kind = FOLDERS[str(method)].partition(".")
    settings = config.quantization_config
    files = Files(source, settings.get("model_file_base_name"), local_files_only=isinstance(source, Path))
    folder: Checkpoint = getattr(import_module(f"{__name__}.{module}"), kind)(files, settings, model)
    del config.quantization_config
    return folder


def _method(config: Any) -> str | None:
    settings = getattr(config, "quantization_config", None)
    return settings.get("quant_method") if isinstance(settings, dict) else None


def _check_installed(package: str, model: str) -> None:
    if find_spec(package) is None:
        raise Refused(f"{model} is read with {package}, which is not installed: pip install 'truedraft[quantize]'")
