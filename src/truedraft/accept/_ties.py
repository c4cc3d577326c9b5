"""Near-ties: choices between tokens whose scores differ by less than rounding; counted, and on request recomputed.

Two implementations of one forward round differently; where the best two tokens lie within that difference, they may
choose differently: a pass over several tokens and one over one token, or the compiled pass and the model's own
forward. The rounding noise of logits is measured when a model is hosted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from truedraft.accept._base import ArgmaxRule
from truedraft.accept._verification import Candidates, Verification
from truedraft.chance import Chance
from truedraft.delegate import Delegate
from truedraft.sampling import Laws
from truedraft.stores.likeliest import two_largest
from truedraft.stores.ranks import ranks_of
from truedraft.tree import Accepted, DraftTree, Row, Scores

TOGETHER = 256  # passes whose largest keys are kept in tensors of their own


class NearTies(Delegate):
    """A rule during one call, with its near-ties counted, and recomputed where `again` is given.

    Args:
        noise: the largest rounding error of a logit.
        again: row -> (V,) logits of its next token, for choices that are near-ties; None keeps the choices of the pass.
            The logits must depend on the row's tokens alone, so that the text does not depend on drafts.

    Attributes:
        margin: scores whose difference is not larger are near-ties.
    """

    laws: Laws
    margin: float
    _again: Callable[[Row], Tensor] | None
    _best: list[Tensor]  # (k, 2) each: the two largest keys of each chosen token;
    _floats: bytearray  # where compiled code finds them, floats instead: making a tensor in each pass takes longer

    def __init__(self, rule: ArgmaxRule, laws: Laws, noise: float, again: Callable[[Row], Tensor] | None = None):
        super().__init__(rule)
        self.laws, self.margin = laws, 2 * noise * laws.gain
        self._again = again
        self._best, self._floats = [], bytearray()

    @property
    def rate(self) -> float | None:
        """The fraction of the chosen tokens that were near-ties; None where keys were not given."""
        found = list(self._best)
        if self._floats:
            found.append(torch.frombuffer(bytearray(self._floats), dtype=torch.float32).view(-1, 2))
        best = torch.cat(found) if found else torch.empty(0)
        return float(self._near(best).double().mean()) if len(best) else None

    def decide_all_nodes(
        self, scores: Scores, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> Sequence[Sequence[int]] | None:
        if self._again is not None:
            return None
        tokens: Sequence[Sequence[int]] | None = self.inner.decide_all_nodes(scores, rows, trees, laws, chance)
        return tokens

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        tokens: list[int] = self.inner.choose(scores, candidates, rows, chance)
        places = [i for i, row in enumerate(rows) if not row.ended]  # ended rows emit padding
        if (keys := self.inner.keys(scores, chance)) is None or not places:
            return tokens
        best = self._kept(two_largest(keys, places))
        if self._again is not None:
            near = self._near(best).tolist()
            for i in (place for place, close in zip(places, near, strict=True) if close):
                again = self.laws.again(rows[i], self._again(rows[i])[None])
                tokens[i] = self.inner.choose(again, [candidates[i]], [rows[i]], chance)[0]
        return tokens

    def verify(self, pass_: Verification) -> list[Accepted]:
        if pass_.tokens is None:
            found = pass_.walked(self.choose)
        else:
            found = pass_.followed(pass_.tokens)
            if (keys := self.inner.keys(pass_.scores.logits, pass_.chance)) is not None:
                paths = [one.path[: _emitted(row, len(one.path))] for row, one in zip(pass_.rows, found, strict=True)]
                if ranks := ranks_of(pass_.scores) if keys is pass_.scores.logits else None:
                    self._floats += ranks.two_largest(paths)
                else:
                    places = [b * keys.shape[1] + node for b, path in enumerate(paths) for node in path]
                    self._kept(two_largest(keys, places))
        return found

    def _kept(self, best: Tensor) -> Tensor:
        """Keep for `rate` (k, 2) the two largest keys at k places, where a token was chosen; returns them."""
        if len(self._best) == TOGETHER:
            self._best = [torch.cat(self._best)]
        self._best.append(best)
        return best

    def _near(self, best: Tensor) -> Tensor:
        """(k,) whether the second largest key is within the margin of the largest. best: (k, 2)."""
        return best[:, 1] >= self.inner.floor(best[:, 0], self.margin)


def _emitted(row: Row, count: int) -> int:
    """The number of the last `count` tokens of a row that are not padding after its end."""
    return count if row.end is None else max(count - len(row.tokens) + row.end, 0)
