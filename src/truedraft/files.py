"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file under another name and rename it.

    Raises:
        OSError: it cannot be written; what stood there still does.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
