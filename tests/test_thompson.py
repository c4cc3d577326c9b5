"""The control by Thompson sampling: how long its drafts are, and the text with them."""

from __future__ import annotations

import pytest
import torch

import truedraft
from models import ragged, tiny
from nets import RULES, drafter
from test_cascade import matches_generate
from truedraft import registry
from truedraft.control.thompson import Thompson
from truedraft.drafters._bandit import Bandit


@pytest.mark.parametrize(("accepted", "rejected"), [(0, 0), (9, 1), (1, 9), (500, 500)])
def test_lengths_follow_the_posterior(accepted: int, rejected: int) -> None:
    """A token follows with the mean of the posterior, Beta(1 + accepted, 1 + rejected), so that lengths up to 8 have a
    known mean; over 4,000 draws, at five standard errors."""
    bandit = Bandit()
    bandit.update(accepted, rejected)
    lengths = [Thompson._length(bandit, 8) for _ in range(4000)]
    mean = (1 + accepted) / (2 + accepted + rejected)
    expected = sum(mean**k for k in range(8))
    error = torch.tensor(lengths).float().std() / 4000**0.5
    assert abs(sum(lengths) / 4000 - expected) < 5 * error
    assert min(lengths) == 1 and Thompson._length(bandit, 0) == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["draft-model", "opt-tree", "suffix", "gumbel-top-k", "eagle3"])
def test_the_text_is_the_targets(name: str, rule: str) -> None:
    model = tiny(dtype=torch.float32)
    matches_generate(model, drafter(name, model), control="thompson", **RULES[rule])


def test_drafts_get_longer_where_they_are_accepted_and_stay_short_where_not() -> None:
    model = tiny()
    ids = ragged(model, 1)
    answers = model.generate(**ids, max_new_tokens=60, do_sample=False, eos_token_id=None)
    mean = {}
    for name in ("oracle", "noise"):
        fast = truedraft.accelerate(model, draft=drafter(name, model, answers, [0]), control="thompson")
        fast.generate(**ids, max_new_tokens=60, do_sample=False, eos_token_id=None)
        offered = [one.offered for made in fast.report().passes[1:] for one in made.emitted]
        mean[name] = sum(offered) / len(offered)
        assert not fast.control._bandits
    assert mean["noise"] < 1.5 < mean["oracle"]
    assert isinstance(registry.load("control", "thompson").another(), Thompson)
