"""What is found in a corpus: as a module of its own, for processes that read one and import little else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from truedraft.stores._cursor import Cursor
from truedraft.stores.corpus import Corpus

PROMPTS = [[3, 1, 2], [0, 5], [6, 6, 1, 4], [2, 2, 2]]


def drafts_of(corpus: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[tuple[Any, ...]]:
    """What REST drafts behind prompts."""
    from truedraft import registry
    from truedraft.tree import Row

    drafter = registry.load("drafters", "rest", corpus=corpus, nodes=12)
    rows = [Row(i, list(prompt), len(prompt), 50) for i, prompt in enumerate(prompts)]
    drafter.start(rows)
    return [(tree.tokens, tree.parent) for tree in drafter.propose(rows, [12] * len(rows))]


def found_in(corpus: Corpus, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Any]:
    """What both forms of the automaton must say alike: the text, and what is known of prompts."""
    found: list[Any] = [list(corpus.automaton.text)]
    for prompt in prompts:
        cursor = Cursor()
        corpus.automaton.follow(cursor, prompt)
        counts = corpus.automaton.grow(cursor, 8, deep=1).counts
        found.append([corpus.automaton.suffixes(cursor), counts, corpus.automaton.copy(cursor, 1, 9)])
    return found
