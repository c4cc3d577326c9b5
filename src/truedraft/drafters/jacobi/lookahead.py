"""Lookahead decoding: each pass also runs a window of Jacobi iterations, and their n-grams are drafted later.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024 (arXiv 2402.02057). A
window of guesses for the next positions, several iterations deep, hangs below the pending token as probes; every pass
turns each column of it into an n-gram of the target's predictions, and n-grams that begin with the pending token are
drafted. It needs no text to copy from, but (N - 1)(W + G) more nodes per pass: almost free on a memory-bound GPU,
expensive on a few cores, where the cost control leaves the window out and only the pool remains.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._trees import root_of
from truedraft.errors import Refused
from truedraft.stores.union import union
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row

FIRST, LATER = 0.2, 0.6  # probability that an n-gram's first and later tokens are right: priors, calibrated online


@dataclass
class JacobiWindow:
    """Of one row: guesses for the next W positions in N - 1 iterations, the oldest first, and the pool of n-grams.

    pool: first token -> the N - 1 tokens that followed it, the latest last.
    """

    rows: list[list[int]]
    random: random.Random
    pool: dict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=lambda: defaultdict(OrderedDict))

    def keep(self, ngram: Sequence[int], most: int) -> None:
        stored = self.pool[ngram[0]]
        stored[tuple(ngram[1:])] = None
        stored.move_to_end(tuple(ngram[1:]))
        if len(stored) > most:
            stored.popitem(last=False)


@dataclass
class Lookahead(PerRow[JacobiWindow]):
    card = Card(
        paper="arXiv 2402.02057 (2024)",
        idea="Guess many positions ahead in every pass, and draft the n-grams that result.",
        family="jacobi",
        presets={"lookahead-7": {"window": 7, "guesses": 7}},
        published="Up to 1.8x on MT-Bench, 1.5x to 2.3x on one GPU.",
    )
    window: int = knob(15, 0, 64)  # positions guessed, W; published 15 for 7B, 10 for 13B, 7 for 34B and above (A100)
    guesses: int = knob(15, 1, 64)  # n-grams kept for each first token and verified, G; published as W
    n: int = knob(5, 2, 16)  # tokens of an n-gram, N; published 5
    prompted: bool = knob(True)  # whether n-grams of the prompt are in the pool from the start; published as an option

    @property
    def width(self) -> int:
        return (self.n - 1) * (self.window + self.guesses)

    def bind(self, target: Target) -> None:
        if not target.branching:
            raise Refused(
                f"draft='lookahead' reads guesses beside its draft, and {type(target.model).__name__} scores single "
                "chains only, because it has states: use another drafter"
            )
        super().bind(target)

    def begin(self, row: Row) -> JacobiWindow:
        pick = random.Random(len(row.tokens))
        text = row.tokens or [0]
        window = JacobiWindow([[pick.choice(text) for _ in range(self.window)] for _ in range(self.n - 1)], pick)
        if self.prompted:
            for at in range(len(row.tokens) - self.n + 1):
                window.keep(row.tokens[at : at + self.n], self.guesses)
        return window

    def draft(self, row: Row, state: JacobiWindow, after: Sequence[int], budget: int) -> DraftTree:
        root, nodes = root_of(row, after), min(self.guesses * (self.n - 1), budget)
        confidence = [FIRST, *[LATER] * (self.n - 2)]
        chains = [DraftTree.chain(root, ngram, confidence) for ngram in reversed(state.pool.get(root, ()))]
        drafts = union(chains, nodes).tree if chains else DraftTree.chain(root, (), ())
        if after or budget < len(drafts) - 1 + self.window * (self.n - 1):
            return drafts
        tokens: list[int] = []
        parents: list[int] = []
        below = [0] * self.window
        for level, guesses in enumerate(state.rows):
            for column, token in enumerate(guesses):
                new = len(drafts) + len(tokens)
                parents.append(below[column] if level else (new - 1 if column else 0))
                below[column] = new
                tokens.append(token)
        return drafts.with_probes(tokens, parents)

    def learn(self, row: Row, state: JacobiWindow, tree: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        columns, emitted = self._newest(state, tree), len(accepted.path)
        if columns:
            new = logits[columns].argmax(-1).tolist()
            for column, token in enumerate(new):
                state.keep([*(guesses[column] for guesses in state.rows), token], self.guesses)
            state.rows = [*state.rows[1:], new]
            emitted -= 1
        state.rows = [
            [*guesses[emitted:], *(state.random.choice(row.tokens) for _ in range(min(emitted, self.window)))]
            for guesses in state.rows
        ]

    def _newest(self, state: JacobiWindow, tree: DraftTree) -> list[int]:
        """Nodes of the newest guesses, one per column; empty where the window was left out of the pass."""

        def probe(parent: int, token: int) -> int:
            children = tree.shape.children[parent]
            return next((c for c in children if c in tree.probes and tree.tokens[c] == token), -1)

        if not tree.probes:
            return []
        columns: list[int] = []
        for token in state.rows[0]:
            columns.append(probe(columns[-1] if columns else 0, token))
            if columns[-1] < 0:
                return []
        for guesses in state.rows[1:]:
            columns = [probe(at, token) for at, token in zip(columns, guesses, strict=True)]
            if min(columns) < 0:
                return []
        return columns
