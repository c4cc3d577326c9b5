"""Drafters with a draft model: ways to give the model, and a cache that keeps up with the rows."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

import nets
import truedraft
from models import V, ragged, sibling, tiny
from truedraft import Drafter, parts, registry
from truedraft.drafters.models import _reader, _vocabularies
from truedraft.drafters.models._reader import Reader
from vocabularies import tokenized

WITH_DRAFT_MODEL = [n for n in registry.names("drafters") if "draft model" in registry.method("drafters", n).card.needs]


@pytest.mark.parametrize("sample", [False, True])
def test_an_assistant_model_is_accepted_as_in_transformers(sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, small = tiny(), sibling(tiny())
    inputs = ragged(model, 3)
    torch.manual_seed(2)
    expected = model.generate(**inputs, max_new_tokens=30, do_sample=sample)
    fast = truedraft.accelerate(model, control="fixed")
    method = registry.method("drafters", "draft-model")
    made, bind = [], method.bind
    monkeypatch.setattr(method, "bind", lambda drafter, target: made.append(drafter) or bind(drafter, target))
    for _ in range(2):
        torch.manual_seed(2)
        got = fast.generate(**inputs, max_new_tokens=30, do_sample=sample, assistant_model=small)
        assert torch.equal(got, expected)
        assert fast.report().drafter == "draft-model" and fast.report().mean_acceptance_length > 1.3
    assert len(made) == 1, "it is bound once"


def test_only_the_last_assistant_is_kept() -> None:
    model = tiny()
    prompt = ragged(model, 1)["input_ids"]
    fast = truedraft.accelerate(model, control="fixed")
    given: list[weakref.ref[Any]] = []
    for seed in range(4):
        assistant = copy.deepcopy(model)
        if seed % 2:  # one that is always wrong, at what may be the address of one that was right
            assistant.lm_head.weight.data.neg_()
        given.append(weakref.ref(assistant))
        fast.generate(prompt, max_new_tokens=33, do_sample=False, assistant_model=assistant)
        assert (fast.report().acceptance_rate == 1.0) != seed % 2, "the drafts are those of this assistant"
        del assistant
        gc.collect()
        assert [ref() is None for ref in given] == [True] * seed + [False]


def test_a_model_is_accepted_as_the_draft() -> None:
    model = tiny()
    fast = truedraft.accelerate(model, draft=model, control="fixed")
    fast.generate(ragged(model, 1)["input_ids"], max_new_tokens=33, do_sample=False)
    assert fast.report().acceptance_rate == 1.0, "its own drafts are all accepted"
    assert fast.report().mean_acceptance_length == pytest.approx(33 / (1 + 4))


def test_sampled_drafts_of_the_target_itself_are_all_accepted() -> None:
    model = tiny()
    fast = truedraft.accelerate(model, draft=model, control="fixed")
    for seed in (None, 5):
        torch.manual_seed(1)
        fast.generate(ragged(model, 1)["input_ids"], max_new_tokens=33, do_sample=True, seed=seed)
        assert fast.report().acceptance_rate == 1.0


def test_a_draft_ends_below_the_confidence() -> None:
    model = tiny()
    strict = registry.load("drafters", "draft-model", model=sibling(model), confidence=0.999)
    lax = registry.load("drafters", "draft-model", model=sibling(model))
    rates = []
    for draft in (strict, lax):
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        fast.generate(ragged(model, 1)["input_ids"], max_new_tokens=40, do_sample=False)
        rates.append(fast.report().acceptance_rate)
    assert rates[0] > rates[1]


def test_the_draft_model_catches_up_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """After budgets of 0 the emitted tokens are read in chunks, and all drafts are accepted again."""
    monkeypatch.setattr(_reader, "CHUNK", 4)
    model = tiny()
    draft = registry.load("drafters", "draft-model", model=model)
    propose, passes = draft.propose, 0

    def pausing(rows, budget):  # type: ignore[no-untyped-def]
        nonlocal passes
        passes += 1
        return propose(rows, budget if passes % 20 == 1 else [0] * len(rows))

    monkeypatch.setattr(draft, "propose", pausing)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    fast.generate(**ragged(model, 3), max_new_tokens=60, do_sample=False)
    assert fast.report().acceptance_rate == 1.0 and passes > 20


def test_a_row_beyond_the_draft_models_context_is_decoded_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, small = tiny(), sibling(tiny("llama", torch.float32))
    monkeypatch.setattr(small.config, "max_position_embeddings", 24)
    fast = truedraft.accelerate(model, draft=small, control="fixed")
    inputs = ragged(model, 1)
    got = fast.generate(**inputs, max_new_tokens=60, do_sample=False)
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=60, do_sample=False))
    assert all(e.offered == 0 for p in fast.report().passes[-20:] for e in p.emitted)


def test_padding_at_the_end_of_a_vocabulary_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.arange(6.0)[None]
    assert _vocabularies.sized(logits, 4).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert _vocabularies.sized(logits, 7)[0, 6] == -torch.inf


@pytest.mark.parametrize("name", ["draft-model", "opt-tree", "dyspec"])
def test_padding_of_a_draft_models_vocabulary_is_never_drafted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is often the likeliest token; the tokenizers, which would be compared, are taken to be equal."""
    monkeypatch.setattr(parts, "check_vocabulary", lambda *_: None)
    model, inputs = tiny(dtype=torch.float32), ragged(tiny(), 3)
    small = copy.deepcopy(sibling(model))
    small.resize_token_embeddings(V + 3, mean_resizing=False)
    with torch.no_grad():
        rows = small.get_output_embeddings().weight
        rows[V:] = 10 * torch.stack([rows[5], -rows[5], rows[9]])
        beyond = small(**inputs).logits[:, -1].argmax(-1) >= V
    fast = tokenized(model, draft=registry.load("drafters", name, model=small), control="fixed")
    out = fast.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert beyond.any() and torch.equal(out, model.generate(**inputs, max_new_tokens=20, do_sample=False))
    assert fast.report().mean_acceptance_length > 1.2


def readers_of(draft: Drafter) -> list[Reader]:
    draft = getattr(draft, "distributions", draft)
    return [part for value in vars(draft).values() for part in (value if isinstance(value, list) else [value])
            if isinstance(part, Reader)]  # fmt: skip


@pytest.mark.parametrize("name", WITH_DRAFT_MODEL)
def test_the_cache_of_a_draft_model_is_released(name: str) -> None:
    model = tiny()
    fast = tokenized(model, draft=nets.drafter(name, model), control="fixed")
    fast.generate(**ragged(model, 3), max_new_tokens=9)
    readers = readers_of(fast.drafter)
    assert readers and all(reader.target.cache is None and not reader.slot_rows for reader in readers)


@pytest.mark.parametrize("name", WITH_DRAFT_MODEL)
def test_a_call_without_drafts_does_not_touch_the_draft_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    fast = tokenized(model, draft=nets.drafter(name, model), control="fixed")
    propose, touched = fast.drafter.propose, list[str]()
    monkeypatch.setattr(fast.drafter, "propose", lambda rows, budget: propose(rows, [0] * len(rows)))
    for reader in readers_of(fast.drafter):
        monkeypatch.setattr(reader, "_host", lambda: touched.append("compared"))
        for method in ("reserve", "prefill", "extend_tapped", "extend_greedily", "score"):
            monkeypatch.setattr(reader.target, method, lambda *_, method=method: touched.append(method))
    inputs = ragged(model, 3)
    expected = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=9, do_sample=False), expected) and not touched
