"""Building a corpus from files: read, tokenised and indexed piece by piece, written whole or not at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import psutil

from truedraft.errors import Refused, why
from truedraft.files import check_file
from truedraft.stores._cursor import SEPARATOR
from truedraft.stores.automaton import automaton
from truedraft.stores.corpus import Corpus, CorpusConfig, fingerprint
from truedraft.stores.texts import Texts

BATCH = 1 << 20  # characters tokenised together, about
PIECES = 256  # pieces tokenised together, at most


@dataclass(frozen=True)
class Built:
    """A corpus that was written.

    bytes: size of its file. characters: of the texts. seconds: total time; tokenising: seconds of it in the tokenizer.
    peak_memory: largest resident memory of the process, in bytes.
    skipped: files left out, by the reason.
    """

    path: str
    documents: int
    tokens: int
    characters: int
    bytes: int
    seconds: float
    tokenising: float
    peak_memory: int
    skipped: dict[str, int]


def build_corpus(
    files: Sequence[str | PathLike[str]],
    tokenizer: Any,
    out: str | PathLike[str],
    *,
    name: str | None = None,
    field: str | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Built:
    """Write a corpus of text or code files, for drafters that look up continuations (`draft="rest:corpus=FILE"`).

    Folders are read recursively, without hidden files and folders; files that are no UTF-8 text are skipped and
    counted. Memory holds the corpus and a few pieces of text, whatever the size of the files.

    Args:
        files: files and folders; each file is a document, as is each line of .jsonl; .gz is unpacked.
        tokenizer: of the model that will use the corpus.
        out: the file to write. It is written whole or not at all.
        name: of the tokenizer, for messages; by default its own.
        field: of .jsonl, the field with the text; by default `text` or `content`.
        force: replace `out` where it exists.
        progress: called with a line of text on the progress.

    Raises:
        Refused: no text is found, or `out` cannot be written.
    """
    path, texts, watch = Path(out), Texts([Path(file) for file in files], field), _Watch(progress)
    check_writable(path, force)
    made, documents = automaton(), 0
    for ids, ends in _tokenised(texts, tokenizer, watch):
        made.extend([*ids, SEPARATOR] if ends else ids)
        documents += ends
        watch.indexed(len(made) - documents)
    if len(made) == documents:
        left_out = ", ".join(f"{count} {why}" for why, count in texts.skipped.items()) or "they are empty"
        raise Refused(f"no text was found in {', '.join(map(str, files))}: {left_out}")
    config = CorpusConfig(name or tokenizer.name_or_path, fingerprint(tokenizer), len(made) - documents, documents)
    progress(f"writing {path}")
    try:
        Corpus(config, made).save(path)
    except OSError as e:
        raise Refused(f"corpus {str(path)!r} cannot be written: {why(e)}") from e
    return Built(
        str(path), documents, config.tokens, watch.characters, path.stat().st_size,
        time.perf_counter() - watch.start, watch.tokenising, _peak_memory(), dict(texts.skipped),
    )  # fmt: skip


class _Watch:
    """Progress, and the time spent in the tokenizer."""

    def __init__(self, progress: Callable[[str], None]):
        self.progress, self.start, self.tokenising, self.characters = progress, time.perf_counter(), 0.0, 0

    def indexed(self, tokens: int) -> None:
        rate = tokens / (time.perf_counter() - self.start)
        self.progress(f"{tokens:,} tokens, {rate:,.0f} a second, {self.characters / 1e6:,.1f} MB of text")


def _tokenised(texts: Iterable[Iterator[str]], tokenizer: Any, watch: _Watch) -> Iterator[tuple[list[int], bool]]:
    """Ids of every piece of text in turn, and whether a document ends with it."""
    for batch in _batches(texts):
        begun = time.perf_counter()
        pieces = [piece for piece, _ in batch]
        encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)
        watch.tokenising += time.perf_counter() - begun
        watch.characters += sum(map(len, pieces))
        yield from zip(encoded["input_ids"], (ends for _, ends in batch), strict=True)


def _batches(texts: Iterable[Iterator[str]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for document in texts:
        piece = next(document, None)
        while piece is not None:
            following = next(document, None)
            batch.append((piece, following is None))
            size += len(piece)
            piece = following
            if size >= BATCH or len(batch) == PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def check_writable(path: Path, force: bool) -> None:
    """Raises Refused where the file cannot be written; called before anything is read."""
    check_file(path, f"corpus {str(path)!r}")
    if path.exists() and not force:
        raise Refused(f"corpus {str(path)!r} exists: force replaces it (--force)")


def _peak_memory() -> int:
    """Largest resident memory of this process, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
