"""The embedded models: their size, their cards, and their texts, which drafts do not change."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import truedraft
from nets import NAMES, drafter, generated, turn
from test_seq2seq import FREE
from truedraft import assets
from truedraft.cli._models import load
from truedraft.cli.demo import cases

READERS = [n for n in assets.names() if '"is_encoder_decoder": true' in (assets.path(n) / "config.json").read_text()]
MODELS = [name for name in assets.names() if name not in READERS]


def test_embedded_models_are_small_and_have_cards() -> None:
    assert "nano" in MODELS and "nano-gec" in READERS
    for name in (*MODELS, *READERS):
        assert (assets.path(name) / "model.safetensors").stat().st_size <= 20e6
        card = (assets.path(name) / "README.md").read_text()
        assert all(part in card for part in ("## Data", "## Validation over time", "## Train it again", "licence"))


def test_embedded_models_share_a_tokenizer() -> None:
    (first, *others) = [loaded(name)[1].get_vocab() for name in MODELS]
    assert all(other == first for other in others)


@cache
def loaded(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load(name, "float32")


@pytest.mark.parametrize(("name", "draft"), [(name, draft) for draft in NAMES for name in turn(draft, MODELS)])
def test_drafts_change_no_token(name: str, draft: str) -> None:
    model, tokenizer = loaded(name)
    prompts = [case.text for case in cases(None, None, None)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    given = dict(max_new_tokens=60, do_sample=False)
    expected = generated(model, inputs, **given).text
    small = loaded("nano-draft")[0]
    fast = truedraft.accelerate(model, tokenizer, draft=drafter(draft, model, small=small), control="fixed")
    assert torch.equal(fast.generate(**inputs, **given), expected)


@pytest.mark.parametrize(("name", "draft"), [(name, draft) for draft in FREE for name in READERS])
def test_drafts_change_no_token_of_an_edit(name: str, draft: str) -> None:
    model, tokenizer = loaded(name)
    lines = (assets.ROOT / "prompts" / "mistakes.txt").read_text().splitlines()
    inputs = tokenizer(lines, return_tensors="pt", padding=True, return_token_type_ids=False)
    given = dict(max_new_tokens=40, do_sample=False)
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
    assert torch.equal(fast.generate(**inputs, **given), model.generate(**inputs, **given))
