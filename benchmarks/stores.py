"""Time of lookups by the size of the store: the stores, and the drafters that use them.

    python benchmarks/stores.py                                # 1 M and 10 M tokens
    python benchmarks/stores.py --tokens 300000 --json OUT

Texts: Python files of the running interpreter (words and signs as tokens, the 50,000 most frequent), and synthetic ones
(Zipf's law, half of it copied from earlier text). Drafters draft for text of the same kind that is not in the store.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from truedraft import registry
from truedraft.drafters._base import Drafter
from truedraft.stores._cursor import Cursor
from truedraft.stores.corpus import Corpus
from truedraft.stores.texts import Texts
from truedraft.tree import Accepted, DraftTree, Row, Scores

VOCABULARY = 50_000
DOCUMENT = 2000  # tokens of an earlier output, or of a synthetic document
HELD = 40_000  # tokens that are not in the store
PROMPT, PASSES, ROWS = 300, 100, 4
CORPUS, MEMORY = ("rest", "sam", "codeswift", "aded"), ("suffix", "lookahead-pia")
REFERENCE = ("prompt-lookup", "llma", "copyspec", "anpd", "sam-alone")


def python_texts(tokens: int) -> list[list[int]]:
    """Documents of `tokens` tokens in total, or of all files where there are fewer."""
    paths = sysconfig.get_paths()
    files = Texts([Path(paths["stdlib"]), Path(paths["purelib"])])
    words, total = [], 0
    for document in files:
        found = re.findall(r" ?\w+|\s+|[^\w\s]", "".join(document))
        words.append(found)
        if (total := total + len(found)) >= tokens:
            break
    ranks = Counter(word for found in words for word in found).most_common(VOCABULARY - 1)
    ids = {word: i for i, (word, _) in enumerate(ranks, 1)}
    documents = [[ids.get(word, 0) for word in found] for found in words]
    random.Random(0).shuffle(documents)
    return documents


def zipf_texts(tokens: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    text = np.minimum(rng.zipf(1.2, tokens), VOCABULARY).astype(np.int32) - 1
    at = 1000
    while at < tokens - 200:
        length, start = int(rng.integers(20, 100)), int(rng.integers(0, at - 100))
        text[at : at + length] = text[start : start + length]
        at += 2 * length
    return [text[i : i + DOCUMENT].tolist() for i in range(0, tokens, DOCUMENT)]


def parted(documents: Sequence[list[int]]) -> tuple[list[int], Iterator[list[int]]]:
    """Text that is held out, and the documents of the store."""
    held: list[int] = []
    rest = iter(documents)
    while len(held) < HELD:
        held += next(rest)
    return held, rest


def timed(f: Any, *args: Any, **kwargs: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = f(*args, **kwargs)
    return time.perf_counter() - start, result


def store_figures(made: tuple[float, Corpus], held: Sequence[int], folder: Path) -> tuple[dict[str, float], Corpus]:
    """Seconds to save and open; microseconds for a token built and followed, a tree of 64 nodes and a copy of 40."""
    seconds, corpus = made
    tokens, path = corpus.config.tokens, folder / "store.tdc"
    figures: dict[str, float] = {"tokens": tokens, "build us": seconds / tokens * 1e6}
    figures["save s"], _ = timed(corpus.save, path)
    figures["bytes"] = path.stat().st_size / tokens
    figures["open s"], corpus = timed(Corpus.open, path)
    automaton, places = corpus.automaton, []
    cursor = Cursor()
    figures["follow us"] = timed(automaton.follow, cursor, held)[0] / len(held) * 1e6
    for at in range(0, len(held) - 20, 40):
        cursor = Cursor()
        automaton.follow(cursor, held[at : at + 20])
        places.append(cursor)
    figures["grow us"] = statistics.median(timed(automaton.grow, place, 64)[0] for place in places) * 1e6
    figures["copy us"] = statistics.median(timed(automaton.copy, place, 1, 40)[0] for place in places) * 1e6
    return figures, corpus


def drafter_figures(name: str, documents: Sequence[list[int]], held: Sequence[int], corpus: Corpus) -> dict[str, Any]:
    """Mean microseconds per row and pass, tokens per pass, and seconds until the first draft."""
    tokens, references = corpus.config.tokens, ()
    knobs: dict[str, Any] = {"corpus": corpus} if name in CORPUS else {"memory": tokens} if name in MEMORY else {}
    start = time.perf_counter()
    drafter: Drafter = registry.load("drafters", name, **knobs)
    if name in MEMORY:
        for document in documents:
            for at in range(0, len(document), DOCUMENT):
                text = document[at : at + DOCUMENT]
                drafter.finish(Row(0, text, 0, 0, end=len(text)), None)  # type: ignore[attr-defined]
    if name in REFERENCE:
        references = (tuple(token for document in documents for token in document),)
    rows, answers = [], []
    for b in range(1 if references else ROWS):
        at = b * HELD // ROWS
        rows.append(Row(b, list(held[at : at + PROMPT]), PROMPT, 10**6, references))
        answers.append(held[at : at + HELD // ROWS])
    drafter.start(rows)
    drafter.propose(rows, [drafter.width] * len(rows))
    begun = time.perf_counter() - start
    spent = [one_pass(drafter, rows, answers) for _ in range(PASSES * (ROWS if references else 1))]
    per_pass = sum(row.step for row in rows) / len(spent) / len(rows)
    return {"drafter": name, "store": "corpus" if name in CORPUS else "memory" if name in MEMORY else
            "reference" if references else "none", "tokens": tokens, "us": statistics.mean(spent) * 1e6,
            "median us": statistics.median(spent) * 1e6, "per pass": per_pass, "begin s": begun}  # fmt: skip


_LOGITS = torch.randn(ROWS, 96, VOCABULARY, generator=torch.Generator().manual_seed(0))


def one_pass(drafter: Drafter, rows: Sequence[Row], answers: Sequence[Sequence[int]]) -> float:
    """Seconds per row of one pass: proposing and observing."""
    proposing, trees = timed(drafter.propose, rows, [drafter.width] * len(rows))
    accepted = [walked(row, tree, answer) for row, tree, answer in zip(rows, trees, answers, strict=True)]
    scores = Scores(_LOGITS[: len(rows), : max(map(len, trees))], {}, [0] * len(rows))
    observing, _ = timed(drafter.observe, rows, trees, scores, accepted)
    return (proposing + observing) / len(rows)


def walked(row: Row, tree: DraftTree, answer: Sequence[int]) -> Accepted:
    """Append to the row the path of the tree that agrees with the answer, and one token more."""
    path, node = [0], tree.child(0, answer[len(row.tokens)])
    while node is not None:
        path.append(node)
        node = tree.child(node, answer[len(row.tokens) + len(path) - 1])
    row.tokens += answer[len(row.tokens) : len(row.tokens) + len(path)]
    return Accepted(tuple(path), row.tokens[-1], False)


def measured(tokens: int, kind: str, names: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    held, rest = parted((python_texts if kind == "python" else zipf_texts)(tokens + 2 * HELD))
    documents, total = [], 0
    for document in rest:
        documents.append(document[: tokens - total])
        if (total := total + len(documents[-1])) >= tokens:
            break
    with tempfile.TemporaryDirectory() as folder:
        store, corpus = store_figures(timed(Corpus.built, documents), held, Path(folder))
        found = [{"text": kind, **drafter_figures(name, documents, held, corpus)} for name in names]
    return {"text": kind, **store}, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--texts", nargs="+", choices=["python", "zipf"], default=["python", "zipf"])
    parser.add_argument("--drafters", nargs="*", default=[*CORPUS, *MEMORY, *REFERENCE, "token-recycling"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [measured(tokens, kind, args.drafters) for kind in args.texts for tokens in args.tokens]
    stores, drafters = [store for store, _ in found], [figures for _, some in found for figures in some]
    for title, rows in (("Stores", stores), ("Drafters", drafters)):
        table = Table(*(rows[0] if rows else ()), title=title)
        for row in rows:
            table.add_row(*map(shown, row.values()))
        Console(width=120).print(table)
    if args.json:
        args.json.write_text(json.dumps({"stores": stores, "drafters": drafters}, indent=2))


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
