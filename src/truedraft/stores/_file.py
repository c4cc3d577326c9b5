"""Arrays in a file in the format of `safetensors`: written whole or not at all, mapped into memory and checked.

The metadata contain the kind of the file, its version, a description of its contents and a checksum of each array.

A mapped file may be replaced at any time: processes that have it open keep the old one. It must not be truncated or
written to in place. `Unchanged` detects that before the next use, which is refused; a process that reads the mapping
while the file is being truncated is killed by the system (SIGBUS).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from truedraft.errors import Refused
from truedraft.files import replacing

PART = 1 << 24  # bytes checked at a time
OWN = "truedraft "  # before the kind of a file, in its metadata


def write(
    path: str | PathLike[str], kind: str, version: int, config: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """Write a file whole or not at all.

    config: the description of its contents, as JSON. arrays: of numpy, by name.

    Raises:
        OSError: it cannot be written; an earlier file of that name is kept.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    description = json.dumps(config)
    metadata = {"format": f"{OWN}{kind}", "version": str(version)}
    metadata |= {"config": description, "checksums": json.dumps(_checksums(arrays, description))}
    try:
        with replacing(Path(path)) as part:
            save_file(dict(arrays), str(part), metadata)
    except SafetensorError as e:
        raise OSError(str(e)) from e


class Unchanged:
    """A check, by a call, that a mapped file was neither truncated nor written to since it was opened.

    name: the file's name in messages.

    Raises:
        OSError: the file cannot be opened.
        Refused: on a call, where it was changed.
    """

    def __init__(self, path: str | PathLike[str], name: str):
        self._name, self._file = name, os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._file)
        self._before = self._state()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def __call__(self) -> None:
        if self._state() != self._before:
            raise Refused(f"{self._name} was changed while it was in use: open it again, and replace such files whole")


class Read(NamedTuple):
    """A file's contents.

    config: the description of its contents. arrays: by name, mapped. unchanged: to be called before they are used.
    """

    config: dict[str, Any]
    arrays: dict[str, Any]
    unchanged: Unchanged


def kind_of(path: str | PathLike[str]) -> str:
    """The kind of a file that was written here; empty for other files, and where there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            found = (file.metadata() or {}).get("format", "")
    except (SafetensorError, OSError):
        return ""
    return found.removeprefix(OWN) if found.startswith(OWN) else ""


def read(path: str | PathLike[str], kind: str, version: int, maker: str) -> Read:
    """A file, mapped and checked.

    maker: the command or call that makes such files, for messages.

    Raises:
        Refused: there is none, or it is damaged, or of another kind or version.
    """
    from safetensors import SafetensorError, safe_open

    file_is = f"{kind} {str(path)!r}"
    if not Path(path).is_file():
        raise Refused(f"{file_is}: there is no such file (`{maker}` makes one)")
    try:
        unchanged = Unchanged(path, file_is)
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if (found := metadata.get("format", "")) != f"{OWN}{kind}":
                other = f", but a {found.removeprefix(OWN)}" if found.startswith(OWN) else ""
                raise Refused(f"{file_is} is no {kind}{other}: leave it as it is, and build one with `{maker}`")
            if metadata["version"] != str(version):
                raise Refused(f"{file_is} has version {metadata['version']}, not {version}: build it anew")
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        expected = json.loads(metadata["checksums"])
        wrong = set(expected.items()) ^ set(_checksums(arrays, metadata["config"]).items())
        if wrong:
            raise ValueError(f"the checksum of {min(wrong)[0]!r} differs")
        config = dict(json.loads(metadata["config"]))
        unchanged()
        return Read(config, arrays, unchanged)
    except Refused:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as e:
        raise Refused(f"{file_is} is damaged, or no {kind} ({' '.join(str(e).split())}): build another") from e


def _checksums(arrays: Mapping[str, Any], config: str) -> dict[str, int]:
    return {name: _checksum(array) for name, array in arrays.items()} | {"config": zlib.crc32(config.encode())}


def _checksum(array: Any) -> int:
    view, total = memoryview(b""), zlib.crc32(f"{array.dtype} {array.shape}".encode())
    if array.size:
        view = memoryview(array).cast("B")
    for at in range(0, len(view), PART):
        total = zlib.crc32(view[at : at + PART], total)
    return total
