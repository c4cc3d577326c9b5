"""Losses of drafts, against loops in float64 written from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, sqrt

import pytest
import torch
from torch import Tensor

from truedraft import Refused
from truedraft.drafters._losses import IGNORED, LOSSES, feature_regression, named

V = 12
SMOOTH = ("ce", "kl", "reverse-kl", "jsd", "tvd", "nla", "top-k")  # where no entries of p and q are equal


def laws(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(2, 3, V) logits and target probabilities, and labels of which one is ignored."""
    g = torch.Generator().manual_seed(seed)
    logits, target = (2 * torch.randn(2, 3, V, generator=g, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, V, (2, 3), generator=g)
    labels[1, 1] = IGNORED
    return logits, target.softmax(-1), labels


def kl_of(p: list[float], q: list[float]) -> float:
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def accepted(p: list[float], q: list[float]) -> float:
    return sum(map(min, p, q))


def hybrid(p: list[float], q: list[float], label: int) -> float:
    weight = exp(-3 * accepted(p, q))
    return weight * kl_of(p, q) + (1 - weight) * (1 - accepted(p, q))


def divergence(p: list[float], q: list[float], label: int) -> float:
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return (kl_of(p, m) + kl_of(q, m)) / 2


SLOW: dict[str, Callable[[list[float], list[float], int], float]] = {
    "ce": lambda p, q, label: -log(q[label]),
    "kl": lambda p, q, label: kl_of(p, q),
    "reverse-kl": lambda p, q, label: kl_of(q, p),
    "jsd": divergence,
    "tvd": lambda p, q, label: sum(max(b - a, 0.0) for a, b in zip(p, q, strict=True)),
    "tvd++": lambda p, q, label: 1 - accepted(p, q),
    "lk": hybrid,
    "nla": lambda p, q, label: -log(accepted(p, q)),
    "top-k": lambda p, q, label: -sum(a * log(b) for a, b in sorted(zip(p, q, strict=True), reverse=True)[:10]),
}


def test_every_loss_has_a_reference() -> None:
    assert SLOW.keys() == LOSSES.keys() and set(SMOOTH) < set(SLOW)


@pytest.mark.parametrize("name", SLOW)
def test_loss_equals_its_definition(name: str) -> None:
    logits, p, labels = laws()
    found = named(name)(logits.log_softmax(-1), p, labels)
    assert found.shape == labels.shape
    q = logits.softmax(-1).tolist()
    for row in range(2):
        for i in range(3):
            label = int(labels[row, i])
            expected = 0.0 if label == IGNORED else SLOW[name](p[row, i].tolist(), q[row][i], label)
            assert float(found[row, i]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_that_of_the_value(name: str) -> None:
    logits, p, labels = laws(1)
    logits.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: named(name)(x.log_softmax(-1), p, labels), logits)


def test_hybrid_has_no_gradient_through_its_weight() -> None:
    logits, p, labels = laws(2)
    logits.requires_grad_(True)
    weight = torch.tensor([
        [exp(-3 * accepted(*pair)) for pair in zip(a, b, strict=True)]
        for a, b in zip(p.tolist(), logits.softmax(-1).tolist(), strict=True)
    ])  # fmt: skip

    def gradient(name: str, factor: Tensor) -> Tensor:
        return torch.autograd.grad((factor * named(name)(logits.log_softmax(-1), p, labels)).sum(), logits)[0]

    expected = gradient("kl", weight) + gradient("tvd", 1 - weight)
    assert torch.allclose(gradient("lk", torch.ones(2, 3)), expected, atol=1e-6)


def test_gradient_of_tvd_is_that_of_a_policy_rewarded_where_the_target_is_higher() -> None:
    """E_{x ~ q}[-r(x) grad log q(x)], r(x) = 1 where p(x) > q(x), summed over the vocabulary (arXiv 2403.00858)."""
    logits, p, labels = laws(6)
    logits.requires_grad_(True)
    named("tvd")(logits.log_softmax(-1), p, labels).sum().backward()
    assert logits.grad is not None
    for row, i in [(row, i) for row in range(2) for i in range(3) if labels[row, i] != IGNORED]:
        q = logits[row, i].softmax(-1).tolist()
        for x in range(V):
            score = [(y == x) - q[x] for y in range(V)]  # of log q(y) by the logit of x
            expected = -sum(q[y] * score[y] for y in range(V) if p[row, i, y] > q[y])
            assert float(logits.grad[row, i, x]) == pytest.approx(expected, abs=1e-12)


def test_tvd_plus_plus_has_the_policy_gradient_of_normalised_rewards() -> None:
    """By logits z: q(x) (A(x) - sum_y q(y) A(y)), with A the negative advantage, the rewards of all counted entries."""
    logits, p, labels = laws(3)
    logits.requires_grad_(True)
    named("tvd++")(logits.log_softmax(-1), p, labels).sum().backward()
    q = logits.softmax(-1).tolist()
    counted = [(row, i) for row in range(2) for i in range(3) if labels[row, i] != IGNORED]
    rewards = {(row, i): [float(p[row, i, x] > q[row][i][x]) for x in range(V)] for row, i in counted}
    flat = [reward for values in rewards.values() for reward in values]
    mean = sum(flat) / len(flat)
    deviation = sqrt(sum((reward - mean) ** 2 for reward in flat) / len(flat))
    assert logits.grad is not None and not logits.grad[1, 1].any()
    for row, i in counted:
        advantage = [(reward - mean) / deviation for reward in rewards[row, i]]
        baseline = sum(a * b for a, b in zip(q[row][i], advantage, strict=True))
        for x in range(V):
            expected = -q[row][i][x] * (advantage[x] - baseline)
            assert float(logits.grad[row, i, x]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("ce", "top-k")])
def test_loss_is_least_where_the_draft_equals_the_target(name: str) -> None:
    _, p, labels = laws(4)
    logits = p.log().requires_grad_(True)
    least = named(name)(logits.log_softmax(-1), p, labels)
    assert torch.allclose(least, torch.zeros(2, 3, dtype=torch.float64), atol=1e-7)
    if name in ("kl", "reverse-kl", "jsd"):  # the others have a kink there
        (gradient,) = torch.autograd.grad(least.sum(), logits)
        assert gradient.abs().max() < 1e-6
    g = torch.Generator().manual_seed(5)
    for size in (0.01, 0.3, 3.0):
        moved = logits + size * torch.randn(2, 3, V, generator=g, dtype=torch.float64)
        more = named(name)(moved.log_softmax(-1), p, labels)
        assert (more[labels != IGNORED] > 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_zeros_give_finite_losses_and_gradients(name: str) -> None:
    """Tokens that the target, the draft, or both never choose; distributions that do not meet; all ignored."""
    ninf = float("-inf")
    logits = torch.tensor([[0.0, ninf, 1.0, ninf], [ninf, ninf, 0.0, 1.0], [300.0, -300.0, 0.0, 0.0]])
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    for labels in (torch.tensor([1, 0, 1]), torch.tensor([IGNORED, IGNORED, IGNORED])):
        log_q = logits.log_softmax(-1).requires_grad_(True)
        found = named(name)(log_q, p, labels)
        (gradient,) = torch.autograd.grad(found.sum(), log_q)
        assert found.isfinite().all() and gradient.isfinite().all() and (found >= 0).all()
        assert bool(found.any()) == bool((labels != IGNORED).any())


def test_draft_far_off_still_has_a_gradient() -> None:
    """Where the target's token has a probability that float32 rounds to 0, the losses that are unbounded move it."""
    p, labels = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
    for name in ("ce", "kl", "nla"):
        logits = torch.tensor([[150.0, -150.0]], requires_grad=True)
        named(name)(logits.log_softmax(-1), p, labels).sum().backward()
        assert logits.grad is not None
        assert logits.grad[0, 1] < -0.9, name


def test_feature_regression_is_smooth_l1() -> None:
    a, b = torch.tensor([[0.0, 0.5, 3.0]]), torch.tensor([[0.0, 0.0, -1.0]])
    assert feature_regression(a, b).tolist() == pytest.approx([(0.5 * 0.25 + (4.0 - 0.5)) / 3])


def test_unknown_loss_is_refused_with_the_choices() -> None:
    with pytest.raises(Refused, match="there is no loss 'mse': choose one of ce, kl, reverse-kl, jsd, tvd"):
        named("mse")
