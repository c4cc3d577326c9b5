"""Near-ties: choices between tokens that are closer than the logits are exact; counted, and on request made again.

Two ways of computing one forward round differently, and where the best two tokens lie within that difference, they may
choose differently: so does a pass over several tokens from one over one, and the compiled pass from the model's own
forward. The noise is measured when a model is hosted.
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
from truedraft.tree import Accepted, DraftTree, Row

HELD = 1 << 18  # numbers, beyond which the two largest are taken: for many passes together it costs each less


class NearTies(Delegate):
    """A rule in one call, its choices held against the noise of the logits.

    Args:
        noise: what a logit is off by, at most.
        again: row -> (V,) logits of its next token, in the place of those within the noise; None keeps these. They must
            depend on the row's tokens alone, so that the text does not depend on what was drafted.

    Attributes:
        margin: scores that are no further apart are near-ties.
    """

    laws: Laws
    margin: float
    _again: Callable[[Row], Tensor] | None
    _keys: list[tuple[Tensor, Sequence[Sequence[int]] | None]]  # of passes, and on which paths; None: everywhere
    _held: int  # numbers among these
    _best: list[Tensor]  # (k, 2) each, the two largest wherever a token was chosen, of passes taken together

    def __init__(self, rule: ArgmaxRule, laws: Laws, noise: float, again: Callable[[Row], Tensor] | None = None):
        super().__init__(rule)
        self.laws, self.margin = laws, 2 * noise * laws.gain
        self._again = again
        self._keys, self._held, self._best = [], 0, []

    @property
    def rate(self) -> float | None:
        """The share of the chosen tokens that were near-ties; None where that was not seen."""
        if self._keys:
            self._reduce()
        return float(self._near(torch.cat(self._best)).double().mean()) if self._best else None

    def decide_all_nodes(
        self, logits: Tensor, rows: Sequence[Row], trees: Sequence[DraftTree], laws: Laws, chance: Chance
    ) -> list[list[int]] | None:
        if self._again is not None:
            return None
        found: list[list[int]] | None = self.inner.decide_all_nodes(logits, rows, trees, laws, chance)
        return found

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        tokens: list[int] = self.inner.choose(scores, candidates, rows, chance)
        places = [i for i, row in enumerate(rows) if not row.ended]  # the others wait for these
        if (keys := self.inner.keys(scores, chance)) is None or not places:
            return tokens
        self._hold(keys if len(places) == len(rows) else keys[places], None)
        if self._again is not None:
            near = self._near(self._reduce()).tolist()
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
                if any(paths):
                    self._hold(keys, paths)
        if self._held > HELD:
            self._reduce()
        return found

    def _hold(self, keys: Tensor, paths: Sequence[Sequence[int]] | None) -> None:
        self._keys.append((keys, paths))
        self._held += keys.numel()

    def _reduce(self) -> Tensor:
        """(k, 2): the two largest wherever a token was chosen since the last time."""
        held = [keys if paths is None else _on(keys, paths) for keys, paths in self._keys]
        self._best.append(two_largest(torch.cat(held)))
        self._keys, self._held = [], 0
        return self._best[-1]

    def _near(self, best: Tensor) -> Tensor:
        """(k,) whether the second of two keys is near the first."""
        return best[:, 1] >= self.inner.floor(best[:, 0], self.margin)


def _emitted(row: Row, count: int) -> int:
    """How many of the last `count` tokens of a row are its own, and no padding behind its end."""
    return count if row.end is None else max(count - len(row.tokens) + row.end, 0)


def _on(keys: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """(k, V) of the paths' nodes; without a copy where they are the first nodes of one row."""
    if len(paths) == 1 and paths[0][-1] == len(paths[0]) - 1:
        return keys[0, : len(paths[0])]
    return keys[[b for b, path in enumerate(paths) for _ in path], [node for path in paths for node in path]]
