"""Lookahead decoding: each pass also runs a window of Jacobi iterations, and their n-grams are drafted later.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024 (arXiv 2402.02057). A
window of guesses for the next positions, several iterations deep, hangs below the pending token as probes; every pass
turns each column of it into an n-gram of the target's predictions, and n-grams that begin with the pending token are
drafted. It needs no text to copy from, but (N - 1)(W + G) more nodes per pass: almost free on a memory-bound GPU,
expensive on a few cores, where the cost control leaves the window out and only the pool remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from truedraft.card import Card, knob
from truedraft.drafters._base import PerRow
from truedraft.drafters._lookahead import JacobiWindow, NgramPool
from truedraft.drafters._trees import root_of
from truedraft.errors import Refused
from truedraft.targets._base import Target
from truedraft.tree import Accepted, DraftTree, Row


@dataclass
class Lookahead(PerRow[tuple[JacobiWindow, NgramPool]]):
    card = Card(
        paper="arXiv 2402.02057 (2024)",
        idea="Guess many positions ahead in every pass, and draft the n-grams that result.",
        family="jacobi",
        presets={"lookahead-7": {"window": 7, "guesses": 7}},
        published="Up to 1.8x on MT-Bench, 1.5x to 2.3x on one GPU.",
        also={
            "jacobi": "draft='lookahead' runs windows of Jacobi iterations and drafts their n-grams; plain Jacobi "
            "decoding is not here",
            "jacobi-decoding": "draft='lookahead' runs windows of Jacobi iterations and drafts their n-grams; plain "
            "Jacobi decoding is not here",
            "lookahead-decoding": "",
            "lade": "",
        },
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
                f"draft='lookahead' reads guesses in addition to its draft, and {type(target.model).__name__} scores "
                "single chains only, because it has states: use another drafter"
            )
        super().bind(target)

    def begin(self, row: Row) -> tuple[JacobiWindow, NgramPool]:
        pool = NgramPool(self.guesses)
        if self.prompted:
            for at in range(len(row.tokens) - self.n + 1):
                pool.keep(row.tokens[at : at + self.n])
        return JacobiWindow.of(row.tokens, self.window, self.n), pool

    def draft(self, row: Row, state: tuple[JacobiWindow, NgramPool], after: Sequence[int], budget: int) -> DraftTree:
        window, pool = state
        drafts = pool.tree(root_of(row, after), min(self.guesses * (self.n - 1), budget))
        if after or budget < drafts.drafted + window.nodes:
            return drafts
        return window.below(drafts)

    def learn(
        self, row: Row, state: tuple[JacobiWindow, NgramPool], tree: DraftTree, logits: Tensor, accepted: Accepted
    ) -> None:
        window, pool = state
        columns = window.newest(tree)
        predicted = logits[columns].argmax(-1).tolist() if columns else []
        window.advance(predicted, len(accepted.path), row.tokens, pool)
