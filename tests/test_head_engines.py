"""Learned heads in engines: threads, heads shared by engines, changed targets, dtypes, and heads that do not fit."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import seq2seq_models
import truedraft
from foreign import FORMATS
from models import V, ragged, tiny
from nets import drafter
from test_changes import CHANGES, SINGLE, fresh
from test_threads import calls_of, hammered
from truedraft import Refused, registry
from truedraft.targets.hosting import hosted
from vocabularies import tokenized

GREEDY: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)


def learned() -> list[str]:
    """Drafters of decoders that need training, with heads that read the target."""
    cards = {name: registry.method("drafters", name).card for name in registry.names("drafters")}
    heads = [n for n, card in cards.items() if "training" in card.needs and "draft model" not in card.needs]
    return [n for n in heads if "decoder" not in cards[n].cannot]


LEARNED = learned()
SHARED = (
    "embedding",
    "depth",
    "fewer_layers",
    "head",
    "in_place",
    "sliced_head",
    "untied",
)  # what heads read of targets


class Recorded:
    """The drafts of an engine."""

    def __init__(self, fast: truedraft.Accelerated):
        self._propose, self.trees = fast.drafter.propose, list[Any]()
        fast.drafter.propose = self._recorded  # type: ignore[method-assign]

    def _recorded(self, rows: Sequence[Any], budget: Sequence[int]) -> Any:
        found = self._propose(rows, budget)
        self.trees += [(tree.tokens, tree.parent) for tree in found]
        return found


class Calling(BaseStreamer):
    """Calls another engine at every token."""

    def __init__(self, fast: truedraft.Accelerated, given: dict[str, Any]):
        self.fast, self.given = fast, given

    def put(self, value: torch.Tensor) -> None:
        self.fast.generate(**self.given)

    def end(self) -> None: ...


@pytest.mark.parametrize("name", LEARNED)
def test_threads_can_share_an_engine(name: str) -> None:
    model = tiny("llama", torch.float32)
    hammered([tokenized(model, draft=drafter(name, model))], calls_of(model, 3), 2, 2)


@pytest.mark.parametrize("name", LEARNED)
def test_engines_can_share_a_head(name: str) -> None:
    """One at every token of the other: the drafts are those of the engine alone."""
    model = tiny("llama", torch.float32)
    first = drafter(name, model)
    shared = [first, registry.load("drafters", name, model=first.model)]  # type: ignore[union-attr]
    fast, second = (truedraft.accelerate(model, draft=draft, control="fixed") for draft in shared)
    given = {"input_ids": SINGLE, **GREEDY}
    alone = Recorded(fast)
    expected = fast.generate(**given)
    fast.forget()
    mixed = Recorded(fast)
    assert torch.equal(fast.generate(**given, streamer=Calling(second, {**ragged(model, 3), **GREEDY})), expected)
    assert mixed.trees == alone.trees[: len(mixed.trees)] and len(mixed.trees) * 2 == len(alone.trees)
    hammered([fast, second], calls_of(model, 3), 2, 2)


@pytest.mark.parametrize("name", LEARNED)
def test_drafts_that_end_at_different_levels_leave_the_others_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a draft is continued varies from level to level, as it does with the measured seconds of levels."""
    model = tiny("llama", torch.float32)
    fast = tokenized(model, draft=drafter(name, model), control="fixed")
    chance = random.Random(5)
    monkeypatch.setattr(type(fast.drafter), "continues", lambda *given: chance.random() < 0.6, raising=False)
    given = ragged(model, 4) | GREEDY | {"max_new_tokens": 40}
    assert torch.equal(fast.generate(**given), model.generate(**given))


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", SHARED)
@pytest.mark.parametrize("name", LEARNED)
def test_the_next_call_follows_a_changed_target(name: str, change: str) -> None:
    model = fresh()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
    fast = tokenized(model, draft=drafter(name, model))
    fast.generate(SINGLE, **GREEDY)
    with torch.no_grad():
        CHANGES[change](model)
    inputs = {n: t.clamp_max(V - 21) for n, t in ragged(model, 3).items()}
    refusals = {"sliced_head": "a head for a target of 61 tokens and hidden size 32, and this one has 41 tokens"}
    if name == "s3d" or max(fast.drafter.needs.hidden, default=0) > 0:
        refusals |= dict.fromkeys(
            ("depth", "fewer_layers"), r"layer=[12]: |eesd:exit=1: |layers \[1\] cannot be skipped"
        )
    if change in refusals:
        with pytest.raises(Refused, match=refusals[change]):
            fast.generate(**inputs, **GREEDY)
        return
    assert torch.equal(fast.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("name", LEARNED)
def test_drafts_follow_weights_changed_in_place(name: str) -> None:
    """They are those of an engine that is made after the change."""
    model = fresh()
    draft: Any = drafter(name, model)
    fast = truedraft.accelerate(model, draft=draft, control="fixed")
    fast.generate(SINGLE, **GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    fast.forget()
    new = truedraft.accelerate(model, draft=registry.load("drafters", name, model=draft.model), control="fixed")
    drafts = Recorded(fast), Recorded(new)
    for engine in (fast, new):
        assert torch.equal(engine.generate(SINGLE, **GREEDY), model.generate(SINGLE, **GREEDY))
    assert drafts[0].trees == drafts[1].trees


@pytest.mark.parametrize("name", LEARNED)
def test_text_of_a_bf16_target_is_that_of_plain_decoding(name: str) -> None:
    model = tiny("llama", torch.bfloat16)
    fast, plain = (truedraft.accelerate(model, draft=draft) for draft in (drafter(name, model), None))
    given = {**ragged(model, 3), **GREEDY}
    assert torch.equal(fast.generate(**given), plain.generate(**given))


@pytest.mark.parametrize("name", LEARNED)
def test_text_of_a_float64_target_is_that_of_the_model(name: str) -> None:
    model = copy.deepcopy(tiny("llama", torch.float32)).double()
    fast = tokenized(model, draft=drafter(name, model))
    given = {**ragged(model, 3), **GREEDY}
    assert torch.equal(fast.generate(**given), model.generate(**given))


def test_a_float64_target_with_eager_attention_is_refused_with_the_remedy() -> None:
    """transformers' own decoding of padded rows gives NaN there."""
    model = FORMATS["eagle"].target(dtype=torch.float64)
    assert model.config._attn_implementation == "eager"
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 3]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert model(ids, attention_mask=mask).logits[0, -1].isnan().any()
    with pytest.raises(Refused, match=r"padded texts in torch.float64 by eager attention gives NaN.*'sdpa'"):
        hosted(model)
    model.set_attn_implementation("sdpa")
    hosted(model)


@pytest.mark.parametrize("name", LEARNED)
def test_encoder_decoders_are_refused(name: str) -> None:
    head: Any = drafter(name, tiny("llama", torch.float32))
    with pytest.raises(Refused, match=rf"{name} cannot draft for BartFor\w+: its head continues"):
        truedraft.accelerate(seq2seq_models.model(), draft=head)


@pytest.mark.parametrize("name", LEARNED)
def test_heads_of_other_models_are_refused_by_their_sizes(name: str) -> None:
    model, other = tiny("llama", torch.float32), tiny("llama", torch.float32, vocabulary=V - 20)
    with pytest.raises(Refused, match=rf"{name}: model= is a head for a target of 41 tokens .* this one has 61"):
        truedraft.accelerate(model, draft=drafter(name, other))
