"""Records the logits behind every emitted token, in a wrapper around a drafter that leaves it unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from truedraft.delegate import Delegate
from truedraft.drafters._base import Drafter
from truedraft.tree import Accepted, DraftTree, Row, Scores


class Tracer(Delegate):
    """Delegates to a drafter, and records by row, in the order of its tokens, what each was chosen from.

    logits: row -> the raw logits (V,) for each emitted token.
    candidates: row -> for each emitted token, the draft below the node before it: the distribution (V,) that its
        children were drawn from, their tokens where they are certain, or None.
    """

    logits: dict[int, list[Tensor]]
    candidates: dict[int, list[Tensor | tuple[int, ...] | None]]

    def __init__(self, drafter: Drafter):
        super().__init__(drafter)
        self.logits, self.candidates = {}, {}

    def open(self) -> None:
        self.logits, self.candidates = {}, {}
        self.inner.open()

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        for b, (row, tree, one) in enumerate(zip(rows, trees, accepted, strict=True)):
            self.logits.setdefault(row.index, []).extend(scores.logits[b, list(one.path)].float().cpu())
            self.candidates.setdefault(row.index, []).extend(_candidates(tree, node) for node in one.path)
        self.inner.observe(rows, trees, scores, accepted)


def _candidates(tree: DraftTree, node: int) -> Tensor | tuple[int, ...] | None:
    if tree.dist is not None and (law := tree.dist[node]) is not None:
        return law
    return tuple(tree.tokens[c] for c in tree.shape.children[node] if c not in tree.probes) or None
