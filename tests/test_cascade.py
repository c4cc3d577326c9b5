"""Cascade speculative drafting: exact for all inner drafts, and with fewer passes of the draft models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import truedraft
from models import ragged, sibling, tiny
from test_seq2seq import both
from test_seq2seq import tiny as paired
from test_seq2seq_drafts import smaller
from truedraft import Refused, registry
from truedraft.drafters.models._reader import Reader

RULES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "seeded": {"do_sample": True, "top_k": 0}}


def cascade(*models: PreTrainedModel, **knobs: Any) -> Any:
    return registry.load("drafters", "cs-drafting", model=list(models), **knobs)


def matches_generate(
    model: PreTrainedModel, draft: Any, rows: int = 3, control: str = "fixed", **settings: Any
) -> truedraft.Report:
    fast = truedraft.accelerate(model, draft=draft, control=control)
    settings = {"max_new_tokens": 40, **settings}
    torch.manual_seed(3)
    expected = model.generate(**ragged(model, rows), **settings)
    torch.manual_seed(3)
    assert torch.equal(fast.generate(**ragged(model, rows), **settings), expected)
    return fast.report()


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lenience", [1.0, 2.0, 5.0, 1e9])
def test_inner_lenience_does_not_change_the_output(lenience: float, rule: str) -> None:
    model = tiny()
    draft = cascade(sibling(model, 0.02), sibling(model), lengths="5x14x10;1x10;10", lenience=lenience)
    report = matches_generate(model, draft, **RULES[rule])
    assert report.mean_acceptance_length > 1.1
    draft = cascade(paired("t5"), smaller("t5"), lengths="3x4x5;1x5;5", lenience=lenience)
    fast = truedraft.accelerate(paired("t5"), draft=draft, control="fixed")
    expected, found = both(fast, **RULES[rule])
    assert torch.equal(expected, found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("below", [(), ("sibling",), ("sibling", "target")])
def test_a_strict_cascade_of_the_target_is_always_accepted(below: tuple[str, ...], rule: str) -> None:
    """The target as its own largest draft model, with any drafters below: every draft is accepted."""
    model = tiny()
    others = [{"sibling": sibling(model), "target": model}[name] for name in below]
    n = len(others)
    lengths = ";".join(["x".join(["7", *"0" * n, "0"]), *("x".join(["4"] * (n + 1 - i)) for i in range(n + 1))])
    report = matches_generate(model, cascade(model, *others, lengths=lengths, lenience=1.0), **RULES[rule])
    assert report.acceptance_rate == 1.0
    assert len(report.passes) == 1 + math.ceil(39 / 8)


def test_a_cascade_needs_fewer_passes_of_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A periodic text: the statistic is right, and the draft model verifies its draft in one pass."""
    model = tiny()
    passes = 0

    def counted(method: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal passes
            passes += 1
            return method(*args)

        return call

    for name in ("score", "expand"):
        monkeypatch.setattr(Reader, name, counted(getattr(Reader, name)))
    phrase = (3 + torch.randperm(50, generator=torch.Generator().manual_seed(1))[:9]).tolist()
    follows = dict(zip(phrase, phrase[1:] + phrase[:1], strict=True))
    periodic = dict(prefix_allowed_tokens_fn=lambda batch, ids: [follows[int(ids[-1])]])
    counts = {}
    for name, draft in {
        "alone": registry.load("drafters", "draft-model", model=model, length=10),
        "cascade": cascade(model, lengths="10x0;10", lenience=1.0),
    }.items():
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        passes = 0
        out = fast.generate(torch.tensor([phrase * 2]), max_new_tokens=56, do_sample=False, **periodic)
        assert out[0].tolist() == (phrase * 10)[: 18 + 56]
        assert fast.report().acceptance_rate == 1.0 and len(fast.report().passes) == 6
        counts[name] = passes
    assert counts == {"alone": 50, "cascade": 5}


def test_the_first_tokens_are_those_of_the_largest_model() -> None:
    """The horizontal cascade: tokens of the first model, which is the target, are right; those of the other are not."""
    model, unrelated = tiny(), sibling(tiny("llama", sharpen=2.0), 0.5)
    fast = truedraft.accelerate(model, draft=cascade(model, unrelated, lengths="3x4x0;0x0;0"), control="fixed")
    fast.generate(**ragged(model, 2), max_new_tokens=30, do_sample=False)
    full = [e for p in fast.report().passes for e in p.emitted if e.offered == 7]
    assert full and all(e.drafted >= 3 for e in full) and any(e.drafted == 3 for e in full)


@pytest.mark.covering(1)
@pytest.mark.parametrize("bottom", ["suffix", "token-recycling", "anpd", "prompt-lookup:length=4", "sam"])
@pytest.mark.parametrize("rule", RULES)
def test_any_per_row_drafter_may_be_the_bottom(bottom: str, rule: str) -> None:
    model = tiny()
    draft = registry.load("drafters", f"cs-drafting:bottom={bottom}", model=sibling(model))
    matches_generate(model, draft, **RULES[rule])


@pytest.mark.parametrize("rule", ["rejection", "multi-round", "block"])
def test_drafts_are_certain_for_rules_that_accept_drawn_drafts(rule: str) -> None:
    model = tiny()
    draft = cascade(sibling(model))
    trees = []
    propose = draft.propose
    draft.propose = lambda rows, budget: trees.extend(found := propose(rows, budget)) or found
    fast = truedraft.accelerate(model, draft=draft, rule=rule, control="fixed")
    fast.generate(**ragged(model, 3), max_new_tokens=20, do_sample=True, seed=1)
    assert trees and all(tree.draws == "certain" and tree.dist is None for tree in trees)


def test_an_end_token_of_the_bottom_ends_the_draft() -> None:
    model = tiny()
    text = model.generate(**ragged(model, 1), max_new_tokens=30, do_sample=False)[0].tolist()
    end = text[20]
    matches_generate(model, cascade(model), rows=1, do_sample=False, eos_token_id=end, pad_token_id=0)


def test_two_models_are_separated_by_a_semicolon() -> None:
    model, tokenizer = truedraft.loading.load("nano")
    spec = "cs-drafting:model=nano;nano-draft,lengths=2x3x4;1x4;4"
    fast = truedraft.accelerate(model, tokenizer, draft=spec, control="fixed")
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(fast.generate(ids, max_new_tokens=24, do_sample=False), expected)
    assert fast.report().drafter == "cs-drafting"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cs-drafting", "needs a draft model: draft='cs-drafting:model=NAME'"),
        ("cs-drafting:lengths=5", "give a row for the target and one for each draft model"),
        ("cs-drafting:lengths=5x10;10;3", "each a length shorter"),
        ("cs-drafting:lengths=ax10;10", "as in '13x10;10'"),
        ("cs-drafting:lengths=0x0;10", "1 to 1,024 tokens in all"),
        ("cs-drafting:lenience=0.5", "a number, 1 to 1e"),
        ("cs-drafting:bottom=opt-tree", "cannot continue another's draft"),
        ("cs-drafting:model=nano;nano-draft", "is for 1 draft models, and there are 2"),
        ("cs-drafting:model=nowhere/at/all", "does not exist"),
    ],
)
def test_invalid_knobs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        model, tokenizer = truedraft.loading.load("nano")
        truedraft.accelerate(model, tokenizer, draft=spec)


def test_models_of_other_vocabularies_are_refused() -> None:
    model, other = tiny(), tiny("llama", vocabulary=40)
    with pytest.raises(Refused, match=r"have different vocabularies \(\[61, 40\]\)"):
        truedraft.accelerate(model, draft=cascade(model, other, lengths="1x1x1;1x1;1"))
    with pytest.raises(Refused, match="has 40 tokens, the model 61"):
        truedraft.accelerate(model, draft=cascade(other))
    with pytest.raises(Refused, match="is a decoder, and the model that it would draft for is an encoder-decoder"):
        truedraft.accelerate(paired("t5"), draft=cascade(model))
    with pytest.raises(Refused, match="is an encoder-decoder, and the model that it would draft for is a decoder"):
        truedraft.accelerate(model, draft=cascade(paired("t5")))
