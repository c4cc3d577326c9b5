"""Acceptance rules alone: the law of what they say, by enumeration over drafts, flips and picks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from truedraft import registry
from truedraft.accept._base import Offer
from truedraft.chance import PositionNoise, Replay, StreamNoise, outcomes
from truedraft.tree import Draws, Row

SIZE = 4
BY_LAW = [n for n in registry.names("accept") if registry.method("accept", n).guarantee == "distribution"]
LAWS = {
    "alike": ([0.5, 0.2, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]),
    "equal": ([0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]),
    "apart": ([0.9, 0.1, 0.0, 0.0], [0.0, 0.1, 0.3, 0.6]),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]),
}


def _offered(q: Tensor, siblings: int, distinct: bool, chance: Replay, row: Row) -> Offer:
    draws: Draws = "distinct" if distinct else "independent"
    return Offer(tuple(chance.draw(q, row, siblings, distinct)), draws, q)


def _law_of(rule: str, p: Tensor, offer: object, row: Row) -> tuple[list[float], float]:
    """The law of what the rule says, and how often that was drafted."""
    judge, said, kept = registry.load("accept", rule), [0.0] * SIZE, 0.0

    def once(chance: Replay) -> tuple[int, bool]:
        offered = offer(chance) if callable(offer) else offer
        (token,) = judge.choose(p.log()[None], [offered], [row], chance)
        return token, token in offered.tokens

    for (token, drafted), probability in outcomes(once):
        said[token] += probability
        kept += probability * drafted
    return said, kept


@pytest.mark.parametrize("siblings", [0, 1, 2, 3])
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("rule", BY_LAW)
def test_drawn_drafts_leave_the_law_as_it_is(rule: str, laws: str, distinct: bool, siblings: int) -> None:
    p, q = (torch.tensor(law) for law in LAWS[laws])
    row = Row(0, [1], 1, 9)
    said, _ = _law_of(rule, p, lambda chance: _offered(q, siblings, distinct, chance, row), row)
    assert said == pytest.approx(p.tolist(), abs=1e-6)


@pytest.mark.parametrize("tokens", [(), (0,), (3, 1), (2, 2, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("laws", LAWS)
@pytest.mark.parametrize("rule", BY_LAW)
def test_certain_drafts_leave_the_law_as_it_is(rule: str, laws: str, tokens: tuple[int, ...]) -> None:
    p, row = torch.tensor(LAWS[laws][0]), Row(0, [1], 1, 9)
    said, kept = _law_of(rule, p, Offer(tokens), row)
    assert said == pytest.approx(p.tolist(), abs=1e-6)
    if rule == "multi-round":  # as much as any rule can keep
        assert kept == pytest.approx(sum(p[t].item() for t in set(tokens)), abs=1e-6)


@pytest.mark.parametrize("laws", LAWS)
def test_rejection_keeps_what_the_laws_share(laws: str) -> None:
    """1 - TV(p, q): the optimum of one draft."""
    p, q = (torch.tensor(law) for law in LAWS[laws])
    row, kept = Row(0, [1], 1, 9), {}
    for rule in ("rejection", "multi-round"):
        _, kept[rule] = _law_of(rule, p, lambda chance: _offered(q, 1, False, chance, row), row)
    shared = torch.minimum(p, q).sum().item()
    assert list(kept.values()) == pytest.approx([shared, shared], abs=1e-6)


def test_siblings_without_replacement_are_kept_more_often() -> None:
    p, q = (torch.tensor(law) for law in LAWS["alike"])
    row = Row(0, [1], 1, 9)
    kept = [
        _law_of("multi-round", p, lambda chance, d=distinct: _offered(q, 2, d, chance, row), row)[1]
        for distinct in (False, True)
    ]
    assert torch.minimum(p, q).sum() < kept[0] < kept[1]


@pytest.mark.parametrize("rule", BY_LAW)
def test_nan_is_said(rule: str) -> None:
    scores = torch.full((1, SIZE), torch.nan)
    row = Row(0, [1], 1, 9)
    assert registry.load("accept", rule).choose(scores, [Offer((2,))], [row], StreamNoise(1)) == [-1]


def test_fresh_noise_does_not_depend_on_neighbours() -> None:
    law, one, other = torch.full((50,), 0.02), Row(0, [1], 1, 9), Row(1, [1], 1, 9)
    alone, beside = PositionNoise([(7, 0), (7, 1)]), PositionNoise([(7, 0), (7, 1)])
    first = [(alone.draw(law, one)[0], alone.flip(0.5, one)) for _ in range(8)]
    second = []
    for _ in range(8):
        beside.flip(0.5, other)
        second.append((beside.draw(law, one)[0], beside.flip(0.5, one)))
    assert first == second and len({token for token, _ in first}) > 4
