"""A corpus on disk: the text of many files, tokenised, in an automaton that is read where it lies in the file.

The file is in the format of `safetensors`; its metadata says the version, how the text was made and a checksum of every
array. Opening it maps it into memory: processes that use the same corpus share it.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from truedraft.errors import Refused
from truedraft.stores.automaton import SEPARATOR, Automaton, automaton, loaded

VERSION = 1
CHUNK = 1 << 16  # tokens learnt at a time
PART = 1 << 24  # bytes checked at a time


@dataclass(frozen=True)
class About:
    """What a corpus is made of.

    tokenizer: name and fingerprint (see `fingerprint`) of the tokenizer that read the texts.
    tokens, documents: how many.
    """

    tokenizer: str
    fingerprint: str
    tokens: int
    documents: int


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts that any row may be offered continuations from."""

    about: About
    automaton: Automaton

    @classmethod
    def built(
        cls,
        documents: Iterable[Sequence[int]],
        tokenizer: str = "",
        mark: str = "",
        progress: Callable[[int], None] = lambda _: None,
    ) -> Corpus:
        """A corpus of documents, taken one at a time.

        documents: token ids. tokenizer, mark: name and fingerprint of what made them.
        progress: told how many tokens there are, now and then.
        """
        made, count = automaton(), 0
        for document in documents:
            text = [*document, SEPARATOR]
            for at in range(0, len(text), CHUNK):
                made.extend(text[at : at + CHUNK])
                progress(len(made))
            count += 1
        return cls(About(tokenizer, mark, len(made) - count, count), made)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it whole or not at all.

        Raises:
            OSError: it cannot be written; what stood there still does.
        """
        from safetensors.numpy import save_file

        path, arrays = Path(path), self.automaton.arrays()
        sums = {name: _checksum(array) for name, array in arrays.items()}
        said = {"format": "truedraft corpus", "version": str(VERSION)}
        said |= {"about": json.dumps(asdict(self.about)), "checksums": json.dumps(sums)}
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            save_file(arrays, str(part), said)
            os.replace(part, path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Corpus:
        """A corpus from its file, mapped and checked.

        Raises:
            Refused: there is none, or it is damaged, or of another version.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise Refused(f"corpus {str(path)!r}: there is no such file (`truedraft corpus build` makes one)")
        try:
            with safe_open(str(path), framework="pt") as file:
                said = file.metadata() or {}
                if said.get("format") != "truedraft corpus":
                    raise Refused(f"corpus {str(path)!r} is no corpus: build one with `truedraft corpus build`")
                if said["version"] != str(VERSION):
                    theirs = said["version"]
                    raise Refused(f"corpus {str(path)!r} has version {theirs}, not {VERSION}: build it anew")
                arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
            sums = json.loads(said["checksums"])
            wrong = [name for name in sums if name not in arrays or _checksum(arrays[name]) != sums[name]]
            about = About(**json.loads(said["about"]))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as e:
            raise Refused(f"corpus {str(path)!r} is damaged ({e}): build it anew") from e
        if wrong:
            raise Refused(f"corpus {str(path)!r} is damaged (the checksum of {wrong[0]!r} differs): build it anew")
        return cls(about, loaded(arrays))


def given(corpus: Corpus | str | PathLike[str]) -> Corpus:
    """A corpus from itself or its file."""
    return corpus if isinstance(corpus, Corpus) else Corpus.open(corpus)


def fingerprint(tokenizer: Any) -> str:
    """Of a tokenizer's vocabulary: equal where the same ids mean the same tokens."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return f"{zlib.crc32(json.dumps(entries).encode()):08x}"


def _checksum(array: Any) -> int:
    view, total = memoryview(array).cast("B") if array.size else memoryview(b""), 0
    for at in range(0, len(view), PART):
        total = zlib.crc32(view[at : at + PART], total)
    return total
