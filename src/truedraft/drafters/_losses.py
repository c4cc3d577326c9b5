"""Losses of a draft distribution against the target's, by name.

Each is a function of `log_q`, (..., V') log-probabilities of the draft; `p`, (..., V') probabilities of the target,
renormalised over the draft's vocabulary; and `labels`, (...) indices of the target's tokens in it, `IGNORED` where a
position does not count. It returns (...) losses, 0 where ignored. Zeros in either distribution give finite losses and
gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from truedraft.errors import Refused

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

IGNORED = -100
LOWEST_DRAFT = -1e4  # logarithm of a draft probability of 0: no penalty overflows in half precision
LEAST_TARGET = torch.finfo(torch.float32).tiny  # what a target probability of 0 counts as in logarithms
TOP = 10  # tokens that `top-k` counts; published 10
DECAY = 3.0  # of the weight of KL in `lk`, as the acceptance rate rises


def ce(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the target's tokens: -log q(label)."""
    return _counted(-_log(log_q).gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1), labels)


def kl(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """KL(p || q), the cross-entropy of soft labels less the target's entropy."""
    return _counted((torch.xlogy(p, p) - p * _log(log_q)).sum(-1), labels)


def top_k(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """-sum p(x) log q(x) over the target's `TOP` likeliest tokens, of HASS (arXiv 2408.15766)."""
    best, tokens = p.topk(min(TOP, p.shape[-1]))
    return _counted(-(best * _log(log_q).gather(-1, tokens)).sum(-1), labels)


def reverse_kl(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """KL(q || p), which avoids tokens that the target does not choose."""
    log_q = _log(log_q)
    return _counted((log_q.exp() * (log_q - _log_target(p))).sum(-1), labels)


def jsd(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Jensen-Shannon divergence: the mean of KL(p || m) and KL(q || m), with m the mean of p and q."""
    log_q = _log(log_q)
    q = log_q.exp()
    log_m = _log_target((p + q) / 2)
    return _counted((torch.xlogy(p, p) - p * log_m + q * (log_q - log_m)).sum(-1) / 2, labels)


def tvd(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Total variation distance, half the sum of |p - q|: the probability that a token drawn from q is rejected."""
    return _counted((p - log_q.exp()).abs().sum(-1) / 2, labels)


def tvd_plus_plus(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """TVD++ (Goel et al., arXiv 2403.00858): its value is the total variation distance, its gradient that of TVD++.

    The gradient of the distance is that of a policy q with the reward r(x) = 1 where p(x) > q(x), and 0 elsewhere:
    E_{x ~ q}[-r(x) grad log q(x)]. TVD++ replaces r by the advantage (r - mean) / deviation. Here the expectation is
    computed over the whole vocabulary. As in the paper, mean and deviation are taken over the positions and the
    vocabulary of a batch: of the rewards at all counted positions and tokens, each with the same weight.
    """
    counted = (labels != IGNORED)[..., None]
    q = log_q.detach().exp()
    reward = ((p > q) & counted).to(log_q.dtype)
    mean = reward.sum() / (counted.sum().clamp_min(1) * p.shape[-1])
    deviation = (mean * (1 - mean)).sqrt()
    advantage = (reward - mean) / deviation.clamp_min(torch.finfo(log_q.dtype).eps)
    surrogate = -(q * advantage * _log(log_q)).sum(-1)
    return tvd(log_q.detach(), p, labels) + _counted(surrogate - surrogate.detach(), labels)


def nla(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Negative log-acceptance, -log sum_x min(p(x), q(x)), of LK losses (arXiv 2602.23881)."""
    log_p = _log_target(p).masked_fill(p == 0, LOWEST_DRAFT)  # else a q below that of p's tokens has no gradient
    return _counted(-torch.minimum(_log(log_q), log_p).logsumexp(-1), labels)


def lk(log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """The hybrid of LK losses (arXiv 2602.23881): w KL(p || q) + (1 - w) (1 - a).

    a is the acceptance rate of a position, sum_x min(p(x), q(x)), and w = exp(-3 a) has no gradient: KL moves drafts
    that are far off, total variation those that are near.
    """
    rejected = tvd(log_q, p, labels)
    weight = (DECAY * (rejected.detach() - 1)).exp()
    return weight * kl(log_q, p, labels) + (1 - weight) * rejected


def feature_regression(features: Tensor, expected: Tensor) -> Tensor:
    """Smooth L1 distance of predicted features to the target's, (..., H) each; mean over H, (...)."""
    return smooth_l1_loss(features, expected, reduction="none").mean(-1)


LOSSES: dict[str, Loss] = {
    "ce": ce, "kl": kl, "reverse-kl": reverse_kl, "jsd": jsd, "tvd": tvd, "tvd++": tvd_plus_plus, "lk": lk, "nla": nla,
    "top-k": top_k,
}  # fmt: skip


def named(name: str) -> Loss:
    """The loss of a name.

    Raises:
        Refused: there is none.
    """
    if name not in LOSSES:
        raise Refused(f"there is no loss {name!r}: choose one of {', '.join(LOSSES)}")
    return LOSSES[name]


def _log(log_q: Tensor) -> Tensor:
    return log_q.clamp_min(LOWEST_DRAFT)


def _log_target(p: Tensor) -> Tensor:
    return p.clamp_min(LEAST_TARGET).log()


def _counted(losses: Tensor, labels: Tensor) -> Tensor:
    return losses.masked_fill(labels == IGNORED, 0.0)
