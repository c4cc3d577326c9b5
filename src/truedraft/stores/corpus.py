"""A corpus on disk: the text of many files, tokenised, in an automaton that is mapped from its file.

The file is in the format of `safetensors`; its metadata contain the version, the tokenizer and a checksum of every
array. Opening it maps it into memory: processes that use the same corpus share it. Where the compiled automaton is not
available, the file written holds the tokens alone, and of any file only these are read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from truedraft.card import shown
from truedraft.errors import Refused, why
from truedraft.stores import _file
from truedraft.stores._cursor import SEPARATOR
from truedraft.stores.automaton import Automaton, automaton, loaded

KIND, VERSION = "corpus", 2


@dataclass(frozen=True)
class CorpusConfig:
    """The origin and size of a corpus.

    tokenizer: name and fingerprint (see `fingerprint`) of the tokenizer that read the texts.
    tokens, documents: their numbers.
    """

    tokenizer: str
    fingerprint: str
    tokens: int
    documents: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CorpusConfig:
        """From the description in a file.

        Raises:
            TypeError, ValueError: it is no such description.
        """
        made = cls(**given)
        if not all(isinstance(text, str) for text in (made.tokenizer, made.fingerprint)):
            raise ValueError("its tokenizer has no name")
        if not all(isinstance(count, int) and count >= 0 for count in (made.tokens, made.documents)):
            raise ValueError("its tokens are not counted")
        return made


@dataclass(frozen=True, eq=False)
class Corpus:
    """Texts from which continuations are drafted for any row.

    name: its name in messages.
    """

    config: CorpusConfig
    _automaton: Automaton
    name: str = "in memory"
    _unchanged: Callable[[], None] = lambda: None

    @property
    def automaton(self) -> Automaton:
        """The index of the text, for immediate use.

        Raises:
            Refused: its file was changed in place since it was opened.
        """
        self._unchanged()
        return self._automaton

    @classmethod
    def built(cls, documents: Iterable[Sequence[int]], tokenizer: str = "", mark: str = "") -> Corpus:
        """A corpus of documents, taken one at a time.

        documents: token ids. tokenizer, mark: name and fingerprint of the tokenizer; without them, any model whose
            vocabulary contains these ids may use the corpus.
        """
        made, count = automaton(), 0
        for document in documents:
            made.extend([*document, SEPARATOR])
            count += 1
        return cls(CorpusConfig(tokenizer, mark, len(made) - count, count), made)

    @cached_property
    def largest(self) -> int:
        """The largest of its token ids."""
        return int(np.max(self.automaton.arrays()["token"], initial=SEPARATOR))

    def check(self, tokenizer: Any) -> None:
        """Raises Refused where a model's tokenizer, if it is given, is not the one that the corpus was built with."""
        if self.config.fingerprint and tokenizer is not None and self.config.fingerprint != fingerprint(tokenizer):
            raise Refused(
                f"corpus {self.name!r} was built with another tokenizer, {self.config.tokenizer!r}: "
                "build it again with the model's own"
            )

    def check_vocabulary(self, size: int) -> None:
        """Raises Refused where it contains token ids outside a vocabulary of this size."""
        if self.largest >= size:
            raise Refused(f"corpus {self.name!r} holds token {self.largest}, and the model has {size}: build it again")

    def save(self, path: str | PathLike[str]) -> None:
        """Write it whole or not at all.

        Raises:
            OSError: it cannot be written; an earlier file of that name is kept.
        """
        _file.write(path, KIND, VERSION, asdict(self.config), self.automaton.arrays())

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Corpus:
        """A corpus from its file, mapped and checked.

        Raises:
            Refused: there is none, or it is damaged, or of another version.
        """
        config, arrays, unchanged = _file.read(path, KIND, VERSION, "truedraft corpus build")
        try:
            return cls(CorpusConfig.of(config), loaded(arrays), str(path), unchanged)
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise Refused(f"corpus {str(path)!r} is damaged ({why(e)}): build it again") from e


def corpora(given: Any) -> tuple[Corpus, ...]:
    """Corpora from None, a Corpus or its file, files with `;` between them, or a list of these.

    Raises:
        Refused: it is none of these, or one cannot be opened.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        given = [part.strip() for part in given.split(";")]
    elif isinstance(given, Corpus | PathLike):
        given = [given]
    if not isinstance(given, list | tuple) or not all(isinstance(one, Corpus | str | PathLike) for one in given):
        raise Refused(f"corpus={shown(given)}: give a Corpus, its file, or a list of these")
    return tuple(one if isinstance(one, Corpus) else Corpus.open(one) for one in given)


_FINGERPRINTS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def fingerprint(tokenizer: Any) -> str:
    """The fingerprint of a tokenizer's vocabulary: equal where the same ids mean the same tokens.

    Added tokens do not count: texts rarely contain them, and a model's padding token is often one of them.
    """
    if tokenizer not in _FINGERPRINTS:
        own = tokenizer.get_vocab().items() - tokenizer.get_added_vocab().items()
        entries = sorted(own, key=lambda entry: entry[1])
        _FINGERPRINTS[tokenizer] = f"{zlib.crc32(json.dumps(entries).encode()):08x}"
    return _FINGERPRINTS[tokenizer]
