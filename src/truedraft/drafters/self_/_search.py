"""A search for the parts of a model that its drafts can spare, one scored set after another."""

from __future__ import annotations

import torch
from torch import Tensor

DOUBT = 1.0  # weight of the prior that a part makes no difference, in sets that skip it


class SkipSearch:
    """A search among sets of parts, all of one size, by scores that others compute.

    Sets are drawn at random, and every so many-th from a model of the scores of all sets before: a linear one, of which
    parts are skipped, with Gaussian weights. One sample of its posterior is maximised exactly, by the parts with the
    largest weights (Thompson sampling; Baptista & Poloczek, arXiv 1806.08838). A set is given by ascending indices.

    Args:
        parts: among which the sets are.
        size: parts of a set, at least one and at most all.
        modelled: every so many-th set is drawn from the model.

    Attributes:
        best: the set with the highest score; before any is scored, parts at even distances.
        score: that of the best.
        tried: the sets that were scored, with their scores.
        stale: sets that were scored since the best one.
    """

    def __init__(self, parts: int, size: int, modelled: int):
        self.parts, self.size, self.modelled = parts, size, modelled
        self.best = tuple((2 * i + 1) * parts // (2 * size) for i in range(size))
        self.score = 0.0
        self.tried: list[tuple[tuple[int, ...], float]] = []
        self.stale = 0
        self._chance = torch.Generator().manual_seed(0)

    def propose(self) -> tuple[int, ...]:
        """The next set to score; the first is `best`."""
        if not self.tried:
            return self.best
        modelled = (len(self.tried) + 1) % self.modelled == 0
        weights = self._sampled_weights() if modelled else torch.rand(self.parts, generator=self._chance)
        return tuple(sorted(weights.topk(self.size).indices.tolist()))

    def record(self, chosen: tuple[int, ...], score: float) -> bool:
        """Add the score of a set; returns whether it is the best so far."""
        self.tried.append((chosen, score))
        better = score > self.score
        self.stale = 0 if better else self.stale + 1
        if better:
            self.best, self.score = chosen, score
        return better

    def _sampled_weights(self) -> Tensor:
        """(parts,) a sample of what skipping each part adds to the score."""
        skips = torch.zeros(len(self.tried), self.parts, dtype=torch.float64)
        for line, (chosen, _) in zip(skips, self.tried, strict=True):
            line[list(chosen)] = 1.0
        scores = torch.tensor([score for _, score in self.tried], dtype=torch.float64)
        skips, scores = skips - skips.mean(0), scores - scores.mean()
        factor = torch.linalg.cholesky(skips.T @ skips + DOUBT * torch.eye(self.parts, dtype=torch.float64))
        mean = torch.cholesky_solve((skips.T @ scores)[:, None], factor)[:, 0]
        noise = torch.randn(self.parts, 1, dtype=torch.float64, generator=self._chance)
        deviation = (scores - skips @ mean).square().mean().sqrt()
        return mean + deviation * torch.linalg.solve_triangular(factor.T, noise, upper=True)[:, 0]
