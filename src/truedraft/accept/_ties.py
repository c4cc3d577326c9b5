"""Near-ties: choices between tokens that are closer than the logits are exact; counted, and on request made again.

Two ways of computing one forward round differently, and where the best two tokens lie within that difference, they may
choose differently: so does a pass over several tokens from one over one, and the compiled pass from the model's own
forward. The noise is measured when a model is hosted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from truedraft.accept._base import Offer, Rule
from truedraft.chance import Chance
from truedraft.delegate import Delegate
from truedraft.sampling import Laws
from truedraft.tree import Accepted, DraftTree, Row, Scores


class NearTies(Delegate):
    """A rule in one call, its choices held against the noise of the logits.

    Args:
        noise: what a logit is off by, at most.
        again: row -> (V,) logits of its next token, in the place of those within the noise; None keeps these. They must
            depend on the row's tokens alone, so that the text does not depend on what was drafted.

    Attributes:
        margin: scores that are no further apart are near-ties.
        chosen, near: tokens chosen, and how many of them within the margin of another.
    """

    laws: Laws
    margin: float
    chosen: int
    near: int | Tensor
    _again: Callable[[Row], Tensor] | None
    _at_once: bool

    def __init__(self, rule: Rule, laws: Laws, noise: float, again: Callable[[Row], Tensor] | None = None):
        super().__init__(rule)
        self.laws, self.margin = laws, 2 * noise * laws.gain
        self.chosen = self.near = 0
        self._again, self._at_once = again, False

    @property
    def rate(self) -> float | None:
        """The share of the chosen tokens that were near-ties; None where that was not seen."""
        return int(self.near) / self.chosen if self.chosen else None

    def ahead(
        self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> list[list[int]] | None:
        found = None if self._again is not None else self.inner.ahead(logits, rows, trees, laws, chance)
        self._at_once = found is not None
        return found

    def choose(self, scores: Tensor, offers: Sequence[Offer], rows: Sequence[Row], chance: Chance) -> list[int]:
        tokens: list[int] = self.inner.choose(scores, offers, rows, chance)
        places = [i for i, row in enumerate(rows) if not row.ended]  # the others wait for these
        if (keys := self.inner.keys(scores, chance)) is None or not places:
            return tokens
        near = self._count(keys if len(places) == len(rows) else keys[places])
        if self._again is not None:
            for i in (i for i, close in zip(places, near.tolist(), strict=True) if close):
                again = self.laws.again(rows[i], self._again(rows[i])[None])
                tokens[i] = self.inner.choose(again, [offers[i]], [rows[i]], chance)[0]
        return tokens

    def observe(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], scores: Scores, accepted: Sequence[Accepted]
    ) -> None:
        if self._at_once:
            for b, one in enumerate(accepted):
                if (keys := self.inner.keys(_on(scores.logits[b], one.path), None)) is not None:
                    self._count(keys)
        self.inner.observe(rows, trees, scores, accepted)

    def _count(self, keys: Tensor) -> Tensor:
        """(k,) whether another token's key is near the best; added up where the keys are, without waiting for them."""
        near = (keys >= self.inner.floor(keys.amax(-1, keepdim=True), self.margin)).sum(-1) > 1
        self.chosen += len(keys)
        self.near = self.near + near.sum()
        return near


def _on(logits: Tensor, path: Sequence[int]) -> Tensor:
    """(k, V) of a path; without a copy where it is the first nodes."""
    return logits[: len(path)] if path[-1] == len(path) - 1 else logits[list(path)]
