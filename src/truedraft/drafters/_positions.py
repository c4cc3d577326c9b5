"""Drafts of positions that are predicted at once, each by its own distribution."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from truedraft.drafters._base import Drafter
from truedraft.drafters._calibration import Calibration
from truedraft.drafters._candidates import DraftVocabulary, candidates
from truedraft.drafters._growing import position_laws
from truedraft.drafters._trees import likeliest_positions
from truedraft.tree import DraftTree, Draws, Row


class PositionsDrafter(Drafter):
    """A drafter all of whose positions are predicted at once: chains, or trees of the likeliest paths, with positions
    taken as independent.

    Fields of every subclass: depth (positions at most), top_k (tokens of a position, 1 for a chain), nodes (of a tree),
    drawn (a chain drawn from the distributions, for rules that verify such drafts).
    """

    prior_confidence = 0.7
    depth: int
    top_k: int
    nodes: int
    drawn: bool
    _vocabulary: DraftVocabulary
    _calibration: Calibration

    @abstractmethod
    def filled(self, rows: Sequence[Row], depths: Sequence[int]) -> Tensor:
        """(rows, positions, draft vocabulary) logits of the next tokens, at least `depths` of them."""

    @abstractmethod
    def deepest(self, row: Row) -> int:
        """Most positions that may be drafted for a row."""

    @property
    def width(self) -> int:
        return self.depth if self.top_k == 1 else max(self.nodes, self.depth)

    @property
    def draws(self) -> Draws:
        return "one" if self.drawn else "certain"

    def propose(self, rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        drafts = [DraftTree.chain(row.tokens[-1], (), ()) for row in rows]
        deepest = [
            min(self.deepest(row), row.room - row.step - 1, most) for row, most in zip(rows, budget, strict=True)
        ]
        if asked := [i for i, depth in enumerate(deepest) if depth > 0]:
            some = [rows[i] for i in asked]
            logits = self.filled(some, [deepest[i] for i in asked])[:, : max(deepest)].float()
            if not self._vocabulary.suffices(some) or self.drawn:
                logits = self._vocabulary.spread(logits)
            for i, laws in zip(asked, position_laws(some, logits), strict=True):
                drafts[i] = self.drafted(rows[i], laws[: deepest[i]], budget[i])
        return drafts

    def drafted(self, row: Row, laws: Tensor, most: int) -> DraftTree:
        """A row's draft of at most `most` nodes. laws: (positions, V)."""
        if self.drawn and self.preferred(row) == "law":
            return drawn_chain(row, laws)
        found = candidates(self, row, laws, range(len(laws)), self.top_k, self._vocabulary)
        most = most if self.top_k == 1 else min(most, self.nodes)
        return self._calibration.proposed(row, likeliest_positions(row.tokens[-1], found, most, row.ends))


def drawn_chain(row: Row, laws: Tensor) -> DraftTree:
    """A chain whose tokens are drawn from the distributions of their positions, (positions, V), independently."""
    tokens: list[int] = []
    for law in laws:
        if not law.any() or (tokens and tokens[-1] in row.ends):
            break
        tokens += row.request.chance.draw(law, row)
    chain = DraftTree.chain(row.tokens[-1], tokens)
    return chain.replaced(dist=(*laws[: len(tokens)], None), draws="one") if tokens else chain
