"""Arrays in a file in the format of `safetensors`: written whole or not at all, mapped into memory and checked.

The metadata say what the file is, its version, what it is about and a checksum of that and of every array.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from truedraft.errors import Refused

PART = 1 << 24  # bytes checked at a time


def write(
    path: str | PathLike[str], kind: str, version: int, about: Mapping[str, Any], arrays: Mapping[str, Any]
) -> None:
    """Write a file whole or not at all.

    arrays: of numpy, by name.

    Raises:
        OSError: it cannot be written; what stood there still does.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path, words = Path(path), json.dumps(about)
    said = {"format": f"truedraft {kind}", "version": str(version)}
    said |= {"about": words, "checksums": json.dumps(_checksums(arrays, words))}
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        part.touch()
        mode = part.stat().st_mode
        save_file(dict(arrays), str(part), said)
        part.chmod(mode)  # safetensors lets only the owner read
        os.replace(part, path)
    except SafetensorError as e:
        raise OSError(str(e)) from e
    finally:
        with suppress(OSError):
            part.unlink()


def read(path: str | PathLike[str], kind: str, version: int, maker: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a file is about, and its arrays by name, mapped and checked.

    maker: what makes such files, for messages.

    Raises:
        Refused: there is none, or it is damaged, or of another kind or version.
    """
    from safetensors import SafetensorError, safe_open

    file_is = f"{kind} {str(path)!r}"
    if not Path(path).is_file():
        raise Refused(f"{file_is}: there is no such file (`{maker}` makes one)")
    try:
        with safe_open(str(path), framework="pt") as file:
            said = file.metadata() or {}
            if said.get("format") != f"truedraft {kind}":
                raise Refused(f"{file_is} is no {kind}: build one with `{maker}`")
            if said["version"] != str(version):
                raise Refused(f"{file_is} has version {said['version']}, not {version}: build it anew")
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        wrong = set(json.loads(said["checksums"]).items()) ^ set(_checksums(arrays, said["about"]).items())
        if wrong:
            raise ValueError(f"the checksum of {min(wrong)[0]!r} differs")
        return dict(json.loads(said["about"])), arrays
    except Refused:
        raise
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as e:
        raise Refused(f"{file_is} is damaged, or none ({' '.join(str(e).split())}): build it anew") from e


def _checksums(arrays: Mapping[str, Any], about: str) -> dict[str, int]:
    return {name: _checksum(array) for name, array in arrays.items()} | {"about": zlib.crc32(about.encode())}


def _checksum(array: Any) -> int:
    view, total = memoryview(b""), zlib.crc32(f"{array.dtype} {array.shape}".encode())
    if array.size:
        view = memoryview(array).cast("B")
    for at in range(0, len(view), PART):
        total = zlib.crc32(view[at : at + PART], total)
    return total
