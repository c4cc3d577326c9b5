"""A corpus on disk: the text of many files, tokenised, in an automaton that is read where it lies in the file.

The file is in the format of `safetensors`; its metadata says the version, how the text was made and a checksum of every
array. Opening it maps it into memory: processes that use the same corpus share it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from truedraft.errors import Refused
from truedraft.stores import _file
from truedraft.stores.automaton import SEPARATOR, Automaton, automaton, loaded

KIND, VERSION = "corpus", 1
CHUNK = 1 << 16  # tokens learnt at a time


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
        _file.write(path, KIND, VERSION, asdict(self.about), self.automaton.arrays())

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Corpus:
        """A corpus from its file, mapped and checked.

        Raises:
            Refused: there is none, or it is damaged, or of another version.
        """
        about, arrays = _file.read(path, KIND, VERSION, "truedraft corpus build")
        try:
            return cls(About(**about), loaded(arrays))
        except TypeError as e:
            raise Refused(f"corpus {str(path)!r} is damaged ({e}): build it anew") from e


def given(corpus: Corpus | str | PathLike[str]) -> Corpus:
    """A corpus from itself or its file."""
    return corpus if isinstance(corpus, Corpus) else Corpus.open(corpus)


def fingerprint(tokenizer: Any) -> str:
    """Of a tokenizer's vocabulary: equal where the same ids mean the same tokens."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return f"{zlib.crc32(json.dumps(entries).encode()):08x}"
