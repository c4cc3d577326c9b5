"""API keys, each with the namespace of its owner."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path

from truedraft.errors import Refused, why
from truedraft.serve.errors import ApiError

VARIABLE = "TRUEDRAFT_API_KEYS"
SHORTEST = 16  # characters of a key
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Keys:
    """Which namespace a key belongs to; without keys everybody has the namespace "".

    Only digests are kept, and all of them are compared, so that the time of a comparison depends on no key.

    Args:
        namespaces: key -> namespace.
    """

    def __init__(self, namespaces: Mapping[str, str]):
        self._digests = [(_digest(key), name) for key, name in namespaces.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def namespaces(self) -> list[str]:
        return sorted({name for _, name in self._digests})

    def namespace(self, key: str) -> str | None:
        """The namespace of a key, None for an unknown one."""
        given, found = _digest(key), None
        for digest, name in self._digests:
            if hmac.compare_digest(digest, given):
                found = name
        return found


def bearer(headers: Mapping[str, str]) -> str:
    """The key in the headers of a request, "" for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def authenticated(keys: Keys, headers: Mapping[str, str]) -> str:
    """The namespace of a request's API key, "" where none is needed.

    Raises:
        ApiError: there is no key, or it is unknown (401).
    """
    if not keys:
        return ""
    name = keys.namespace(bearer(headers))
    if name is None:
        raise ApiError(
            401, "the API key is missing or unknown: send it as 'Authorization: Bearer KEY'", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    return name


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(path: Path | None) -> Keys:
    """The keys of a file, or of the environment variable TRUEDRAFT_API_KEYS; none where neither is given.

    Each line of the file, or entry of the variable between commas, is `NAMESPACE=KEY`, or a key alone, whose namespace
    is then "default". Lines that begin with # are comments.

    Raises:
        Refused: the file cannot be read, is readable for all users, or an entry is malformed; keys are not quoted.
    """
    if path is None:
        entries, where = os.environ.get(VARIABLE, "").split(","), VARIABLE
    else:
        try:
            entries, where = path.read_text(encoding="utf-8-sig").splitlines(), f"api_keys {path}"
            readable = path.stat().st_mode & 0o004
        except (OSError, UnicodeDecodeError) as e:
            raise Refused(f"api_keys {path}: {why(e)}") from e
        if readable:
            raise Refused(f"api_keys {path} is readable for every user of this machine: chmod 600 {path}")
    keys: dict[str, str] = {}
    for i, line in enumerate(entries, 1):
        if _counts(line):
            key, name = _entry(line.strip(), f"{where}, entry {i}")
            if keys.setdefault(key, name) != name:
                raise Refused(f"{where}, entry {i}: its key is that of namespace {keys[key]}: give each key once")
    if not keys and (path is not None or os.environ.get(VARIABLE)):
        raise Refused(f"{where} has no keys: add one, or leave the option out")
    return Keys(keys)


def _counts(line: str) -> bool:
    return bool(line.strip()) and not line.strip().startswith("#")


def _entry(text: str, where: str) -> tuple[str, str]:
    name, found, key = text.partition("=")
    if not found:
        name, key = "default", text
    if not NAME.fullmatch(name):
        raise Refused(f"{where}: a namespace has 1 to 64 letters, digits, dots, dashes and underscores")
    if len(key) < SHORTEST or not key.isprintable() or " " in key:
        raise Refused(f"{where}: a key has at least {SHORTEST} characters, without spaces")
    return key, name
