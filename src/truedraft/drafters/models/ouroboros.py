"""Ouroboros: a draft model drafts by lookahead decoding, and phrases from its pool continue the draft.

Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative Decoding", EMNLP 2024 (arXiv
2402.13720). The draft model does not decode token by token: each of its passes verifies pooled phrases that begin with
the last token, and reads a window of Jacobi iterations, which fills the pool with more. The draft ends in several
phrases that begin with its last token, as branches, which cost nodes of the target's pass and no pass of the draft
model. What the target would have chosen in rejected tokens and phrases corrects the pool, which is kept over rows of a
namespace.

It wins where a pass of either model over some hundred nodes costs little more than over one, as on a GPU, and where
texts resemble those before them. On a few cores the window is dear (`window=0` leaves it out, and then only what
corrects long drafts fills the pool); on texts that repeat themselves, copying is cheaper. A rejected token begins a
phrase only if `phrase` tokens of the draft are behind it, so with the published `length` of 4 the pool is corrected by
the branches alone. Drafts are point masses, which every rule but `k-seq` accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from truedraft.card import Card, knob
from truedraft.drafters._base import Drafter
from truedraft.drafters._lookahead import JacobiWindow, NgramPool, Phrase, continued
from truedraft.drafters.models._model import unnamed
from truedraft.drafters.models._nested import GrowingChain, verified
from truedraft.drafters.models._reader import Reader, loaded
from truedraft.stores.memory import Tenants
from truedraft.stores.union import followed
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row, Scores


class Proposed(NamedTuple):
    """A row's draft: its chain, and the phrases behind it. start: tokens of the row before it."""

    start: int
    chain: list[int]
    phrases: list[Phrase]


@dataclass
class Ouroboros(Drafter):
    card = Card(
        paper="arXiv 2402.13720 (2024)",
        idea="A smaller model drafts by lookahead decoding, and phrases that it makes on the way continue the draft.",
        family="draft model",
        needs=("draft model",),
        presets={"ouroboros-12": {"length": 12}},
        published="Up to 1.9x over lookahead decoding, 2.8x over speculative decoding, 3.9x over plain decoding.",
    )
    model: Any = None  # a model of transformers, or its name: a folder, an embedded model, one on the hub
    length: int = knob(4, 1, 64)  # tokens of the chain, gamma; published 4 by default, 12 in the example
    branches: int = knob(3, 0, 16)  # phrases behind it, K; published 3
    window: int = knob(20, 0, 64)  # positions that the draft model guesses in each of its passes; published 20
    guesses: int = knob(20, 1, 64)  # phrases kept for each first token, all verified by the draft model; published 20
    phrase: int = knob(6, 1, 15)  # tokens of a phrase behind its first; published 6
    namespaces: int = knob(64, 1, 65_536)  # kept, least recently used evicted first; published: one pool for all

    prior_confidence = 0.7
    autoregressive = reads_texts = True

    def __post_init__(self) -> None:
        self.model, self.tokenizer = loaded(self.model)
        self._reader = Reader(self.model)
        self.forget()

    def forget(self) -> None:
        self._pools = Tenants(self.namespaces, lambda: NgramPool(self.guesses), lambda pool: pool.nbytes)
        self._windows: dict[Row, JacobiWindow] = {}
        self._proposed: dict[Row, Proposed] = {}

    @property
    def vocab_size(self) -> int | None:
        return None if self.model is None else self._reader.vocab_size

    @property
    def width(self) -> int:
        return self.length + self.branches * self.phrase

    def bind(self, target: Target) -> None:
        if self.model is None:
            raise unnamed(self)
        self._reader.fit(target)

    def start(self, rows: Sequence[Row]) -> None:
        self._reader.start(rows, self.length + self.phrase * (self.window + self.guesses))
        for row in rows:
            self._windows[row] = JacobiWindow.of(row.tokens, self.window, self.phrase + 1)

    def end(self, row: Row) -> None:
        self._reader.end(row)
        self._windows.pop(row, None)
        self._proposed.pop(row, None)

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        self._proposed.clear()
        drafts = [
            GrowingChain(row, min(most, self.length, row.room - row.step - 1))
            for row, most in zip(rows, budget, strict=True)
        ]
        if any(draft.most > 0 for draft in drafts):
            self._reader.admit(rows)
        while growing := [
            draft
            for draft in drafts
            if len(draft.drafted) < draft.most and not draft.over and draft.readable(self._reader)
        ]:
            self._extend(growing)
        return [self._finished(draft, most) for draft, most in zip(drafts, budget, strict=True)]

    def _extend(self, drafts: Sequence[GrowingChain]) -> None:
        """A step of lookahead decoding by the draft model, in one pass."""
        trees = [self._guessed(draft) for draft in drafts]
        found = verified(self, self._reader, drafts, trees)
        for draft, tree, (tokens, logits) in zip(drafts, trees, found, strict=True):
            draft.append(tokens)
            columns = logits[len(tree) - self.window :].argmax(-1).tolist() if tree.probes else []
            self._windows[draft.row].advance(columns, len(tokens), draft.row.tokens, self._pool_of(draft.row))

    def _guessed(self, draft: GrowingChain) -> DraftTree:
        """What the draft model reads behind a draft: phrases that it may choose, and its window."""
        most, window = draft.most - len(draft.drafted) - 1, self._windows[draft.row]
        tree = self._pool_of(draft.row).tree(draft.last, self.guesses * self.phrase).shallow(most)
        reach = len(draft.drafted) + self.window + self.phrase - 1
        return window.below(tree) if window.nodes and self._reader.fits(draft.row, reach) else tree

    def _pool_of(self, row: Row) -> NgramPool:
        return self._pools.of(row.namespace)

    def _finished(self, draft: GrowingChain, budget: int) -> DraftTree:
        """The chain, and the newest phrases behind it as far as there is room."""
        row, chain = draft.row, draft.drafted
        rest, depth = budget - len(chain), row.room - row.step - 1 - len(chain)
        if draft.over or rest <= 0 or depth <= 0 or not self.branches:
            self._proposed[row] = Proposed(len(row.tokens), chain, [])
            return DraftTree.chain(row.tokens[-1], chain)
        pool = self._pool_of(row)
        self._proposed[row] = Proposed(len(row.tokens), chain, pool.newest(draft.last, self.branches))
        return continued(chain, row.tokens[-1], pool.tree(draft.last, rest, self.branches).shallow(depth))

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for row, tree, logits in zip(rows, trees, scores.logits, strict=True):
            if (proposed := self._proposed.pop(row, None)) is not None and tree.drafted:
                likeliest = logits[: len(tree)].argmax(-1).tolist()
                self._correct(self._pool_of(row), tree, likeliest, proposed, row.tokens[proposed.start :])

    def _correct(
        self, pool: NgramPool, tree: DraftTree, likeliest: Sequence[int], proposed: Proposed, emitted: Sequence[int]
    ) -> None:
        """Correct the pool by what the target found likeliest at the nodes of a draft.

        tree: as it was verified. emitted: the tokens of the pass.
        """
        chain = followed(tree, proposed.chain)
        pairs = zip(proposed.chain, emitted, strict=False)
        rejected = chain[next((n for n, (a, b) in enumerate(pairs) if a != b), len(chain)) :]
        for ngram in corrected([tree.tokens[n] for n in rejected], [likeliest[n] for n in rejected], self.phrase):
            pool.keep(ngram)
        if len(chain) == len(proposed.chain):
            last = chain[-1] if chain else 0
            changed = {}
            for rest in proposed.phrases:
                nodes = followed(tree, [*proposed.chain, *rest[:-1]])[len(chain) :]
                if len(nodes) == len(rest) - 1:
                    changed[rest] = tuple(likeliest[node] for node in (last, *nodes))
            pool.replace(tree.tokens[last], changed)


def corrected(drafted: Sequence[int], predicted: Sequence[int], length: int) -> list[Phrase]:
    """The n-grams of a rejected token and `length` tokens that the target predicts: of these, each but the last is the
    token that was drafted there, so that the target read it.

    predicted: after each drafted token, the target's likeliest.
    """
    return [
        (drafted[at], *predicted[at : at + length])
        for at in range(len(drafted) - length + 1)
        if predicted[at : at + length - 1] == drafted[at + 1 : at + length]
    ]
