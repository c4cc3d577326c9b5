"""Reading the lines of a file, and writing one whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from truedraft.errors import Refused, reason


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to be written under another name, and renamed at the end; where that is not reached, it is removed.

    Links are followed, and an existing file's permissions kept.

    Raises:
        OSError: it cannot be written; what stood there still does.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        private = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if path.exists() else 0o666)
        with open(private, "wb") as file:
            yield file
        if path.exists():
            shutil.copymode(path, part)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name and rename it.

    Raises:
        OSError: it cannot be written; what stood there still does.
    """
    with whole(path) as file:
        file.write(text.encode())


def read_bytes(path: Path) -> bytes:
    """What a file holds, uncompressed where its name ends in `.gz`.

    Raises:
        Refused: there is no such file, it cannot be read, or it is not what its name says.
    """
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise Refused(f"{path} cannot be read: {reason(error)}") from error


def read_lines(path: Path) -> list[str]:
    """The lines of a text, without their ends; other breaks than newlines stay within a line.

    Raises:
        Refused: as `read_bytes`, or the text is not UTF-8.
    """
    data = read_bytes(path)
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Refused(f"{path}: line {line} is not UTF-8; convert the file, for instance with iconv") from error
    if lines[-1] == "":
        del lines[-1]
    return [line.removesuffix("\r") for line in lines]
