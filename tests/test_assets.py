"""The embedded models: they fit, they say where they come from, and drafts change no token of theirs."""

from __future__ import annotations

import pytest
import torch

import truedraft
from nets import drafter
from truedraft import assets, registry
from truedraft.cli._models import load
from truedraft.cli.demo import cases

MODELS = assets.names()


def test_the_models_fit_and_have_cards() -> None:
    assert "nano" in MODELS
    size = sum((assets.path(name) / "model.safetensors").stat().st_size for name in MODELS)
    assert size <= 30e6
    for name in MODELS:
        card = (assets.path(name) / "README.md").read_text()
        assert all(part in card for part in ("## Data", "## Validation over time", "## Train it again", "licence"))


def test_the_models_share_a_tokenizer() -> None:
    (first, *others) = [load(name, "float32")[1].get_vocab() for name in MODELS]
    assert all(other == first for other in others)


@pytest.mark.parametrize("draft", registry.names("drafters"))
@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_token(name: str, draft: str) -> None:
    model, tokenizer = load(name, "float32")
    small = load("nano-draft", "float32")[0]
    fast = truedraft.accelerate(model, tokenizer, draft=drafter(draft, model, small=small), control="fixed")
    prompts = [case.text for case in cases(None, None, None)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    expected = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=60, do_sample=False), expected)
