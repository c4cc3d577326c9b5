"""CodeSwift: for code, draft the target's earlier top candidates, then matches in the project, then in a corpus.

Zhang et al., "CodeSwift: Accelerating LLM Inference for Efficient Code Generation", 2025 (arXiv 2502.17139). A cache
holds, for the last few tokens, the tokens that the target found likeliest there before, rejected ones included. The
project (the references and the text so far) and a general corpus are searched for the longest suffix of the text; the
project's continuations come first. There is no search after white space, nor for a suffix recently found nowhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from truedraft.card import Card, knob
from truedraft.drafters._trees import frequency_tree, root_of
from truedraft.drafters.lookup._corpora import WithCorpora
from truedraft.drafters.lookup._texts import RowText, row_text
from truedraft.stores.likeliest import likeliest
from truedraft.stores.memory import Places, Tenants
from truedraft.stores.union import union
from truedraft.tree import Accepted, DraftTree, Row

Key = tuple[int, ...]
RANKS = (0.5, 0.15, 0.08, 0.05)  # probability that a cached alternative is right, by rank: a prior
GENERAL = 0.1  # weight of the general corpus, relative to the project
ENTRY = 400  # bytes of an entry of a cache, approximately


@dataclass
class Habits:
    """Of a namespace: the target's likeliest tokens by the last few tokens, and suffixes that were found nowhere."""

    likely: OrderedDict[Key, list[int]] = field(default_factory=OrderedDict)
    missing: OrderedDict[Key, None] = field(default_factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        return ENTRY * (len(self.likely) + len(self.missing))


@dataclass
class CodeSwift(WithCorpora[tuple[RowText, Places, Habits]]):
    card = Card(
        paper="arXiv 2502.17139 (2025)",
        idea="Draft the target's earlier top candidates here, then continuations from the project and a corpus.",
        family="retrieval",
        published="Up to 2.53x in repositories, 2.54x standalone, over plain decoding.",
        also={
            "fastcoder": "",
        },
    )
    takes_references = True
    nodes: int = knob(64, 1, 1024)  # of the tree; published 64
    longest: int = knob(16, 1, 1024)  # tokens of the longest suffix searched; published about 16
    deep: int = knob(10, 1, 128)  # tokens of a continuation; unpublished
    context: int = knob(3, 1, 64)  # tokens that the cache is keyed by; unpublished
    kept: int = knob(4, 1, 16)  # alternatives for each key; unpublished
    entries: int = knob(200_000, 1, 10_000_000)  # keys of a namespace, least recently used evicted first; unpublished
    namespaces: int = knob(64, 1, 65_536)  # kept, least recently used evicted first; unpublished
    corpus: Any = None  # a Corpus of code or its file, or several (a.tdc;b.tdc); published: public code

    def forget(self) -> None:
        super().forget()
        self._habits: Tenants[Habits] = Tenants(self.namespaces, Habits, lambda habits: habits.nbytes)
        self._texts: dict[int, bool] = {}  # token -> whether it is white space
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def width(self) -> int:
        return self.nodes

    def read(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().read(tokenizer)
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._texts = tokenizer, {}

    def begin(self, row: Row) -> tuple[RowText, Places, Habits]:
        return row_text(row, self.pass_cost), Places(), self._habits.of(row.namespace)

    def draft(self, row: Row, state: tuple[RowText, Places, Habits], after: Sequence[int], budget: int) -> DraftTree:
        text, places, habits = state
        text.follow(row)
        nodes, last = min(self.nodes, budget), (*row.tokens[-self.longest :], *after)[-self.longest :]
        trees, weights = [self._cached(habits, last, nodes)], [1.0]
        searched = self.found(places, row, after)
        if not self._blank(last[-1]) and last[-2:] not in habits.missing:
            sources = [(*place, 1.0) for place in text.places(after, self.longest)]
            for automaton, cursor in searched:
                automaton.shorten(cursor, self.longest)
                sources.append((automaton, cursor, GENERAL))
            for automaton, cursor, weight in sources:
                for length, count in automaton.suffixes(cursor)[:1]:
                    found = automaton.grow(cursor, nodes, deep=self.deep)
                    trees.append(frequency_tree(root_of(row, after), found, count, length))
                    weights.append(weight)
            if not any(cursor.length > 1 for _, cursor, _ in sources):
                habits.missing[last[-2:]] = None
        return union(trees, nodes, weights).tree

    def _cached(self, habits: Habits, last: Sequence[int], nodes: int) -> DraftTree:
        """A tree of the cached alternatives after the last tokens, and after each of these in turn."""
        tokens, parents, confidence = [last[-1]], [-1], [1.0]
        keys = [tuple(last[-self.context :])]
        at = 0
        while at < len(tokens) and len(tokens) <= nodes:
            cached = habits.likely.get(keys[at], ())
            for rank, token in enumerate(cached if at == 0 else cached[:1]):
                tokens.append(token)
                parents.append(at)
                confidence.append(RANKS[min(rank, len(RANKS) - 1)])
                keys.append((*keys[at], token)[-self.context :])
            at += 1
        return DraftTree(tuple(tokens), tuple(parents), confidence=tuple(confidence))

    def learn(
        self, row: Row, state: tuple[RowText, Places, Habits], tree: DraftTree, logits: Tensor, accepted: Accepted
    ) -> None:
        habits = state[2]
        end = len(row.tokens) - len(accepted.path)
        before = row.tokens[max(end - self.longest, 0) : end]
        path = list(accepted.path)
        for i, node in enumerate(path):
            (best,) = likeliest(logits[node : node + 1], self.kept)
            key = tuple((*before, *(tree.tokens[n] for n in path[1 : i + 1]))[-self.context :])
            habits.likely[key] = best or habits.likely.get(key, [])
            habits.likely.move_to_end(key)
        habits.missing.pop(tuple(row.tokens[-3:-1]), None)
        for store in (habits.likely, habits.missing):
            while len(store) > self.entries:
                store.popitem(last=False)

    def _blank(self, token: int) -> bool:
        if self._tokenizer is None:
            return False
        if token not in self._texts:
            self._texts[token] = not str(self._tokenizer.decode([token])).strip()
        return self._texts[token]
