"""Custom rules, by either contract, in `generate`; and `accept` on single rows compared with `verify` on a batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

import truedraft
from matrix import SPELT
from models import ragged, tiny
from nets import drafter, eos_inside, generated, padding_of
from scripted import V, random_draft
from truedraft import Card, registry
from truedraft.accept._base import NodeRule, Rule
from truedraft.accept._verification import Candidates, TargetProbs, Verdict, Verification
from truedraft.chance import Chance, PositionNoise
from truedraft.sampling import History, Laws
from truedraft.stopping import Stops
from truedraft.tree import DraftTree, Row, Scores


@dataclass
class CustomRule(Rule):
    card = Card(paper="none", idea="The likeliest token, down the tree.", family="own")
    guarantee, samples, preferred_drafts = "tokens", False, "likeliest"

    def accept(self, tree: DraftTree, probs: TargetProbs, row: Row, chance: Chance) -> Verdict:
        path = [0]
        while True:
            token = int(probs[path[-1]].argmax())
            child = tree.child(path[-1], token)
            if child is None:
                return path, token
            path.append(child)


@dataclass
class CustomNodeRule(NodeRule):
    card = Card(paper="none", idea="The likeliest token.", family="own")
    guarantee, samples, preferred_drafts = "tokens", False, "likeliest"

    def choose(
        self, scores: Tensor, candidates: Sequence[Candidates], rows: Sequence[Row], chance: Chance
    ) -> list[int]:
        return scores.argmax(-1).tolist()


class Even(StoppingCriteria):
    """An unknown criterion, which forces lockstep: it ends a row where most of its last tokens are even."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -9:] % 2 == 0).sum(-1) > 6


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "penalty": {"repetition_penalty": 1.3},
    "stop string": {"stop_strings": ["b", "k"], "tokenizer": SPELT},
    "lockstep": {"stopping_criteria": StoppingCriteriaList([Even()])},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", [CustomRule, CustomNodeRule])
def test_custom_rule_gives_the_output_of_generate(rule: type[Rule], setting: str, ended: bool) -> None:
    model, given = tiny(), SETTINGS[setting]
    for inputs in (ragged(model, 3), ragged(model, 1)):
        settings = dict(max_new_tokens=30, do_sample=False, pad_token_id=0, **given)
        if ended:
            settings["eos_token_id"] = eos_inside(model, inputs, do_sample=False)
        expected: Any = model.generate(**inputs, **settings)
        text = expected if isinstance(expected, Tensor) else expected.sequences
        fast = truedraft.accelerate(
            model, SPELT, draft=drafter("oracle", model, text, padding_of(inputs)), rule=rule(), control="fixed"
        )
        found = fast.generate(**inputs, **settings)
        if isinstance(expected, Tensor):
            assert torch.equal(found, expected)
        else:
            assert torch.equal(found.sequences, expected.sequences)
            for own, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
                assert torch.allclose(torch.stack(own), torch.stack(theirs), atol=1e-5)
        assert fast.report().mean_acceptance_length > 1.2 and fast.report().rule == "test-own-rules"


class Counting(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        return scores


def test_unknown_processors_require_a_node_rule() -> None:
    model = tiny()
    settings = dict(max_new_tokens=8, do_sample=False, logits_processor=[Counting()])
    for inputs in (ragged(model, 1), ragged(model, 3)):
        with pytest.raises(truedraft.Refused, match=r"'test-own-rules' needs the laws.*Counting.*use rule='greedy'"):
            truedraft.accelerate(model, rule=CustomRule()).generate(**inputs, **settings)
        found = truedraft.accelerate(model, rule=CustomNodeRule()).generate(**inputs, **settings)
        assert torch.equal(found, generated(model, inputs, max_new_tokens=8, do_sample=False).text)


def test_recheck_refuses_a_rule_without_keys() -> None:
    with pytest.raises(truedraft.Refused, match=r"ties='recheck'.*test-own-rules"):
        truedraft.accelerate(tiny(), rule=CustomRule(), ties="recheck")


ALONE = [(kind, name) for kind in ("accept", "accept.lossy") for name in registry.names(kind) if name != "nest"]


def drafted(rng: random.Random, row: Row, rule: Rule) -> DraftTree:
    """A random tree, with children drawn in a way that the rule accepts."""
    tree = random_draft(rng, row, 9)
    draws = "independent" if rule.accepts_draws is None else next(iter(rule.accepts_draws - {"certain"}))
    if draws == "one":
        tree = random_draft(rng, row, 4).cut(2)
    dist = tuple(torch.rand(V).softmax(-1) for _ in tree.tokens)
    return DraftTree(tree.tokens, tree.parent, dist, tree.probes, draws)


@pytest.mark.parametrize(("kind", "name"), ALONE)
def test_accept_on_one_row_equals_verify_on_a_batch(kind: str, name: str) -> None:
    """`accept` on each row and `verify` on all of them give the same paths and tokens, and use the same noise."""
    longest = 0
    for seed in range(30):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        rows = [Row(i, [rng.randrange(V) for _ in range(n)], n, 12) for i, n in enumerate((3, 3, 3))]
        history = History(torch.tensor([row.tokens for row in rows]), 12, 0, rows)
        laws = Laws(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7), TemperatureLogitsWarper(0.8)]), history)
        rule: Rule = registry.load(kind, name)
        trees = [drafted(rng, row, rule) for row in rows]
        logits = 2 * torch.randn(3, max(map(len, trees)), V)
        noise = [PositionNoise([(seed, i) for i in range(3)]) for _ in range(2)]
        alone = [
            rule.accept(tree, TargetProbs(row, tree, logits[i], laws), copy.copy(row), noise[0])
            for i, (row, tree) in enumerate(zip(rows, trees, strict=True))
        ]
        assert all(row.step == 0 for row in rows)
        stops = Stops(StoppingCriteriaList([MaxLengthCriteria(15)]), history, laws)
        scores = Scores(logits, {}, [0] * 3)
        found = rule.verify(Verification(rows, trees, scores, laws, stops, noise[1], 0))
        assert [(tuple(path), token) for path, token in alone] == [(one.path, one.token) for one in found]
        assert [row.tokens[3:] for row in rows] == [
            [*(tree.tokens[i] for i in path[1:]), token] for tree, (path, token) in zip(trees, alone, strict=True)
        ]
        assert noise[0].fresh == noise[1].fresh
        longest = max(longest, *(len(path) for path, _ in alone))
    assert longest > 1
