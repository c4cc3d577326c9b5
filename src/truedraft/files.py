"""Reading the lines of a file, writing one whole or not at all, and checking beforehand that this will be possible."""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from truedraft.errors import Refused, why


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context: the name of an empty file, which replaces `path` at the end and is removed on an error.

    Links are followed. An existing file's permissions are kept, and only the owner may read its replacement while it is
    written; a new file has the default permissions.

    Raises:
        OSError: it cannot be written; an earlier file of that name is kept.
    """
    path = Path(os.path.realpath(path))
    part = _part(path)
    try:
        replaces = path.exists()
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if replaces else 0o666))
        mode = stat.S_IMODE((path if replaces else part).stat().st_mode)
        yield part
        part.chmod(mode)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _part(path: Path) -> Path:
    """A name for a file while it is written."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def check_file(path: Path, name: str) -> None:
    """Check, before any work, that `replacing` can write a file. Nothing is left behind.

    name: of the path in messages, as in "--out PATH".

    Raises:
        Refused: it cannot; the message gives the reason.
    """
    with _explained(name):
        if path.is_dir():
            raise Refused(f"{name} is a folder: name a file")
        if path.exists() and not path.is_file():
            raise Refused(f"{name} is not a regular file: name another")
        real = Path(os.path.realpath(path))
        if not real.parent.is_dir():
            raise Refused(f"{name}: {real.parent} is no folder that can be written: name a file in one that exists")
        _try_in(real)


def check_folder(path: Path, name: str) -> None:
    """As `check_file`, for a folder, which is made with the folders above it where there is none."""
    with _explained(name):
        if path.exists() and not path.is_dir():
            raise Refused(f"{name} is not a folder: name another")
        real = Path(os.path.realpath(path))
        missing = [folder for folder in (real, *real.parents) if not folder.exists()]
        made: list[Path] = []
        try:
            for folder in reversed(missing):
                folder.mkdir()
                made.append(folder)
            _try_in(real / "part")
        finally:
            for folder in reversed(made):
                folder.rmdir()


def _try_in(path: Path) -> None:
    """Make and remove the file that `path` would be while it is written."""
    part = _part(path)
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    part.unlink()


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Within the block, what the system says of a path is a refusal."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null in a name
        if isinstance(error, Refused):
            raise
        raise Refused(f"{name} cannot be written: {why(error)}; name another place") from error


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to be written as by `replacing`.

    Raises:
        OSError: it cannot be written; an earlier file of that name is kept.
    """
    with replacing(path) as part, open(part, "wb") as file:
        yield file


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name and rename it.

    Raises:
        OSError: it cannot be written; an earlier file of that name is kept.
    """
    with whole(path) as file:
        file.write(text.encode())


def read_bytes(path: Path) -> bytes:
    """The contents of a file, decompressed where its name ends in `.gz`.

    Raises:
        Refused: there is no such file, it cannot be read, or its name ends in `.gz` and it is not compressed.
    """
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise Refused(f"{path} cannot be read: {why(error)}") from error


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
