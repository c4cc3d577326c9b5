"""The optimal acceptance of the transport problem, against a linear program and the rules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from truedraft.accept import optimal_acceptance
from truedraft.chance import Replay, outcomes
from truedraft.tree import Row

SIZE = 5


def law(seed: int, size: int = SIZE, sharp: float = 1.5) -> Tensor:
    scores = sharp * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores.softmax(-1)


def program(p: Tensor, drafts: dict[tuple[int, ...], float]) -> float:
    """max P(token among the drafts) over all joint laws with these marginals: the transport problem itself."""
    sets = list(drafts)
    gain = [-1.0 if y in s else 0.0 for s in sets for y in range(len(p))]
    rows = np.zeros((len(sets) + len(p), len(gain)))
    for i in range(len(sets)):
        rows[i, i * len(p) : (i + 1) * len(p)] = 1
    for y in range(len(p)):
        rows[len(sets) + y, y :: len(p)] = 1
    return -linprog(gain, A_eq=rows, b_eq=[*drafts.values(), *p.tolist()]).fun


def drafted(qs: list[Tensor], distinct: bool) -> dict[tuple[int, ...], float]:
    """The law of the drafts, by enumeration."""
    found: dict[tuple[int, ...], float] = {}

    def draw(chance: Replay) -> tuple[int, ...]:
        row = Row(0, [1], 1, 9)
        if distinct:
            return tuple(chance.draw(qs[0], row, len(qs), True))
        return tuple(chance.draw(q, row)[0] for q in qs)

    for tokens, probability in outcomes(draw):
        found[tokens] = found.get(tokens, 0.0) + probability
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("draws", ["independent", "distinct"])
@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_that_of_a_linear_program(seed: int, draws: str, n: int) -> None:
    p, q = law(seed), law(seed + 50)
    expected = program(p, drafted([q] * n, draws == "distinct"))
    assert optimal_acceptance(p, [q] * n, draws) == pytest.approx(expected, abs=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_from_different_laws(seed: int) -> None:
    p, qs = law(seed), [law(seed + 20), law(seed + 40), law(seed + 60)]
    assert optimal_acceptance(p, qs) == pytest.approx(program(p, drafted(qs, False)), abs=1e-6)


def test_the_best_set_of_tokens_is_found() -> None:
    """Over all 4,096 sets H of twelve tokens: the least p(H) + 1 - the product of q(H)."""
    sets = torch.tensor(list(itertools.product((0.0, 1.0), repeat=12)), dtype=torch.float64)
    for seed, sharp in itertools.product(range(25), (1.5, 2.5, 4.0)):
        p, qs = law(seed, 12, sharp), [law(100 * i + seed, 12, sharp) for i in range(1, 3 + seed % 4)]
        least = (sets @ p + 1 - torch.stack([sets @ q for q in qs]).prod(0)).min()
        assert optimal_acceptance(p, qs) == pytest.approx(float(least), abs=1e-8)


@pytest.mark.parametrize("seed", range(4))
def test_certain_drafts_and_one_drawn(seed: int) -> None:
    p, q = law(seed), law(seed + 50)
    certain = q.topk(2).indices
    rest = q.index_fill(0, certain, 0.0)
    rest = rest / rest.sum()
    marginals = {(*certain.tolist(), y): float(rest[y]) for y in range(SIZE) if rest[y] > 0}
    assert optimal_acceptance(p, [q] * 3, "last") == pytest.approx(program(p, marginals), abs=1e-6)
    assert optimal_acceptance(p, [q, law(9)], "certain") == pytest.approx(
        float(p[torch.stack([q.argmax(), law(9).argmax()]).unique()].sum())
    )


def test_the_optimum_depends_on_the_laws_in_use() -> None:
    p, q = law(1), law(2)
    assert optimal_acceptance(p, [q, law(9)], "distinct") == optimal_acceptance(p, [q, q], "distinct")
    assert optimal_acceptance(p, [q, q]) == optimal_acceptance(p, [q, q], "one") < optimal_acceptance(p, [q] * 3)
    certain_law = torch.eye(SIZE, dtype=torch.float64)[3]
    assert optimal_acceptance(p, [certain_law, certain_law], "last") == pytest.approx(float(p[3])), (
        "nothing is left to draw"
    )


def test_one_draft_is_accepted_with_the_overlap_of_the_laws() -> None:
    p, q = law(1, 8000), law(2, 8000)
    assert optimal_acceptance(p, [q]) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-9)


def test_large_vocabularies() -> None:
    p, q = law(3, 4000, 3.0), law(4, 4000, 3.0)
    values = {d: [optimal_acceptance(p, [q] * n, d) for n in (1, 2, 4)] for d in ("independent", "distinct")}  # type: ignore[arg-type]
    for a, b in itertools.pairwise(values["independent"]):
        assert a < b
    assert all(i <= d + 1e-9 for i, d in zip(values["independent"], values["distinct"], strict=True))
    others = optimal_acceptance(p, [q, law(5, 4000, 3.0)])
    assert values["independent"][0] - 1e-9 <= others <= 1


def test_invalid_laws_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        optimal_acceptance(law(1), [law(2, 7)])
    with pytest.raises(ValueError, match="one length"):
        optimal_acceptance(law(1), [])
