"""The highest acceptance probability of any rule for several drafts: an upper bound to compare rules with.

Sun et al. (SpecTr, arXiv 2310.15141, section 3) pose it as optimal transport with membership cost; by duality it is
min over sets H of tokens of p(H) + 1 - P(all drafts in H) (Hu et al., arXiv 2502.18779, theorem 2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.tree import Draws

ROUNDS = 500  # most iterations of the search for H, where drafts have different laws
CLOSE = 1e-9


def optimal_acceptance(p: Tensor, qs: Sequence[Tensor], draws: Draws = "independent") -> float:
    """The highest probability with which a token of law `p` can be one of the drafts.

    Args:
        p: (V,) the target's law.
        qs: the laws, (V,) each, that the drafts were drawn from, one per draft.
        draws: "independent" (or "one"); "distinct": without replacement, all from the first law; "last": the first
            drafts are the likeliest tokens of the first law, the last is drawn from the rest of it; "certain": each
            draft is the likeliest token of its law.

    Raises:
        ValueError: laws of different sizes, or no draft.
    """
    if not qs or any(q.shape != p.shape or q.ndim != 1 for q in qs):
        raise ValueError(f"p and each of qs must be vectors of one length, got {[tuple(q.shape) for q in [p, *qs]]}")
    p, laws = p.double(), [q.double() for q in qs]
    n, q = len(laws), laws[0]
    if draws == "certain":
        return float(p[torch.stack([law.argmax() for law in laws]).unique()].sum())
    if draws == "last":
        certain = q.topk(n - 1).indices
        rest = q.index_fill(0, certain, 0.0)
        share = rest / rest.sum() if rest.sum() > 0 else rest
        return float(p[certain].sum() + p.index_fill(0, certain, 0.0).minimum(share).sum())
    if draws == "distinct" or all(torch.equal(law, q) for law in laws):
        return _by_ratio(p, q, n, draws == "distinct")
    return _least(p, laws)


def _by_ratio(p: Tensor, q: Tensor, n: int, distinct: bool) -> float:
    """Where all drafts come from one law, H consists of the tokens with the smallest p/q."""
    order = (p / q.clamp_min(1e-300)).argsort()
    p, q = p[order], q[order]
    inside = torch.cat([q.new_zeros(1), q.cumsum(0)]).clamp_max(1.0)
    inside = _all_inside(q, n) if distinct else inside**n
    return float((torch.cat([p.new_zeros(1), p.cumsum(0)]) + 1 - inside).min().clamp_max(1.0))


def _all_inside(q: Tensor, n: int) -> Tensor:
    """(V + 1,) the probabilities that n draws from q without replacement are all among the first 0, 1, ... V tokens.

    Such draws are the first n arrivals of exponential clocks with rates q. By time t clock x has rung with probability
    1 - exp(-q_x t); n of the first m clocks must have rung before the first of the others, whose total rate is the sum
    of theirs. The integral over that time is computed as a sum at equal steps of log t.
    """
    n = min(n, int(q.count_nonzero()))
    step = 0.05
    t = torch.arange(-18.0, 30.0, step, dtype=q.dtype).exp()
    rung = torch.zeros(n, len(t), dtype=q.dtype)  # P(exactly 0 .. n - 1 of the clocks so far)
    rung[0] = 1.0
    inside, rest = [q.new_zeros(())], float(q.sum())
    for rate in q.tolist():
        stays = torch.exp(-rate * t)
        rung[1:] = rung[1:] * stays + rung[:-1] * (1 - stays)
        rung[0] *= stays
        rest -= rate
        density = rest * t * torch.exp(-rest * t) * step
        inside.append((density * (1 - rung.sum(0))).sum() if rest > CLOSE else q.new_ones(()))
    return torch.stack(inside).clamp(0, 1)


def _least(p: Tensor, laws: Sequence[Tensor]) -> float:
    """min over H of p(H) + 1 - the product of q(H): the minimum of a submodular function, by its minimum-norm point.

    Fujishige and Isotani, "A submodular function minimization algorithm based on the minimum-norm base", 2011, with
    Wolfe's algorithm for the point. The search ends when its upper and lower bounds meet.
    """

    def prefixes(order: Tensor) -> Tensor:
        covered = torch.stack([law[order].cumsum(0) for law in laws]).prod(0)
        return p[order].cumsum(0) - covered

    def base(weights: Tensor) -> tuple[Tensor, float]:
        order = weights.argsort()
        values = prefixes(order)
        corner = torch.empty_like(p)
        corner[order] = values.diff(prepend=values.new_zeros(1))
        return corner, min(float(values.min()), 0.0)

    point, best = base(p - torch.stack(list(laws)).mean(0))
    corners, shares = point[None], torch.ones(1, dtype=p.dtype)
    for _ in range(ROUNDS):
        corner, value = base(point)
        best = min(best, value)
        if best - float(point.clamp_max(0).sum()) < CLOSE or point @ (point - corner) < CLOSE**2:
            break
        corners, shares = torch.cat([corners, corner[None]]), torch.cat([shares, shares.new_zeros(1)])
        while True:
            ones = torch.ones(len(corners), dtype=p.dtype)
            solved = torch.linalg.lstsq(corners @ corners.T + torch.outer(ones, ones), ones[:, None]).solution[:, 0]
            nearest = solved / solved.sum()
            if bool((nearest > -CLOSE).all()):
                shares = nearest.clamp_min(0)
                break
            falling = nearest < shares
            reach = float((shares[falling] / (shares[falling] - nearest[falling])).min())
            shares = shares + min(reach, 1.0) * (nearest - shares)
            kept = shares > 1e-12
            corners, shares = corners[kept], shares[kept]
        shares = shares / shares.sum()
        point = shares @ corners
    return 1 + best
