"""Lookahead decoding: a window of Jacobi iterations, and the pool of n-grams that it makes, which are drafted later."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from random import Random

from truedraft.drafters._trees import grafted
from truedraft.stores.union import union
from truedraft.tree import DraftTree

FIRST, LATER = 0.2, 0.6  # probability that an n-gram's first and later tokens are right: priors
TOKENS = 32_768  # first tokens that a pool has n-grams of, the least recently used forgotten first

Phrase = tuple[int, ...]


class NgramPool:
    """N-grams by their first token: for each the `most` last kept, the newest last.

    phrases: first token -> the rests of its n-grams.
    """

    def __init__(self, most: int):
        self._most = most
        self.phrases: OrderedDict[int, OrderedDict[Phrase, None]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Memory, approximately, in bytes."""
        return 100 * sum(map(len, self.phrases.values()))

    def keep(self, ngram: Sequence[int]) -> None:
        """Add an n-gram as the newest of its first token."""
        first, rest = ngram[0], tuple(ngram[1:])
        stored = self.phrases.setdefault(first, OrderedDict())
        self.phrases.move_to_end(first)
        stored[rest] = None
        stored.move_to_end(rest)
        if len(stored) > self._most:
            stored.popitem(last=False)
        if len(self.phrases) > TOKENS:
            self.phrases.popitem(last=False)

    def newest(self, first: int, count: int | None = None) -> list[Phrase]:
        """What follows a token, the newest first."""
        return [*reversed(self.phrases.get(first, ()))][:count]

    def replace(self, first: int, corrected: dict[Phrase, Phrase]) -> None:
        """Put other phrases in the places of some that follow a token."""
        if first in self.phrases:
            self.phrases[first] = OrderedDict.fromkeys(corrected.get(rest, rest) for rest in self.phrases[first])

    def tree(self, root: int, nodes: int, count: int | None = None) -> DraftTree:
        """The newest n-grams from a token on as branches of a tree of at most so many nodes, with confidences."""
        chains = [DraftTree.chain(root, rest, [FIRST, *[LATER] * (len(rest) - 1)]) for rest in self.newest(root, count)]
        return union(chains, nodes).tree if chains and nodes > 0 else DraftTree.chain(root, (), ())


@dataclass
class JacobiWindow:
    """Of one row: guesses for the next W positions in N - 1 iterations, the oldest first.

    random: fills columns that nothing was predicted for.
    """

    rows: list[list[int]]
    random: Random

    @classmethod
    def of(cls, text: Sequence[int], window: int, n: int) -> JacobiWindow:
        """W random tokens of a text in each of the N - 1 iterations."""
        pick, some = Random(len(text)), text or [0]
        return cls([[pick.choice(some) for _ in range(window)] for _ in range(n - 1)], pick)

    @property
    def nodes(self) -> int:
        """Nodes that it takes in a pass."""
        return len(self.rows) * len(self.rows[0])

    def below(self, tree: DraftTree) -> DraftTree:
        """A tree with the window as probes below its root: the oldest guesses are a chain, and those of each column
        follow each other below it."""
        parents = _window_parents(len(tree), len(self.rows), len(self.rows[0]))
        return tree.with_probes([*chain.from_iterable(self.rows)], parents)

    def newest(self, tree: DraftTree) -> list[int]:
        """The nodes of its newest guesses in a verified tree, one per column; empty where it is not in it."""

        def probe(parent: int, token: int) -> int:
            children = tree.shape.children[parent]
            return next((c for c in children if c in tree.probes and tree.tokens[c] == token), -1)

        if not tree.probes:
            return []
        columns: list[int] = []
        for token in self.rows[0]:
            columns.append(probe(columns[-1] if columns else 0, token))
            if columns[-1] < 0:
                return []
        for guesses in self.rows[1:]:
            columns = [probe(at, token) for at, token in zip(columns, guesses, strict=True)]
            if min(columns) < 0:
                return []
        return columns

    def advance(self, predicted: Sequence[int], emitted: int, text: Sequence[int], pool: NgramPool) -> None:
        """Move on after a pass, with n-grams for the pool.

        predicted: by column, the token after its newest guess; empty where the window was not in the pass.
        emitted: tokens of the text that the pass added. text: its tokens.
        """
        if predicted:
            for column, token in enumerate(predicted):
                pool.keep([*(guesses[column] for guesses in self.rows), token])
            self.rows = [*self.rows[1:], list(predicted)]
            emitted -= 1
        new = min(emitted, len(self.rows[0]))
        self.rows = [[*guesses[emitted:], *(self.random.choice(text) for _ in range(new))] for guesses in self.rows]


@lru_cache(maxsize=1024)
def _window_parents(first: int, levels: int, columns: int) -> tuple[int, ...]:
    """The parents of a window's nodes, the first of which has this index."""
    oldest = (0, *range(first, first + columns - 1))[:columns]
    return (*oldest, *range(first, first + (levels - 1) * columns))


def continued(drafted: Sequence[int], root: int, after: DraftTree) -> DraftTree:
    """A chain below a root, and a tree below its last token; without confidences."""
    return grafted(DraftTree.chain(root, drafted, [1.0] * len(drafted)), len(drafted), after).replaced(confidence=None)
