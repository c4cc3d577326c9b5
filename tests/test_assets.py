"""The embedded models: their size, their cards, and their texts, which drafts do not change."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

import truedraft
from models import tiny
from nets import NAMES, drafter, generated, turn
from test_canvas import plain
from test_seq2seq import FREE
from truedraft import assets, registry
from truedraft.bench.stretched import stretched
from truedraft.canvas.layout import Layout
from truedraft.canvas.predicting import Chooser
from truedraft.canvas.reference import step_by_step
from truedraft.cli._models import load
from truedraft.cli._options import CANVASES
from truedraft.cli.demo import cases
from truedraft.loading import kind_of

READERS = [n for n in assets.names() if '"is_encoder_decoder": true' in (assets.path(n) / "config.json").read_text()]
DIFFUSING = [name for name in assets.names() if kind_of(assets.path(name)) == "canvas"]
MODELS = [name for name in assets.names() if name not in READERS + DIFFUSING]


def test_embedded_models_are_small_and_have_cards() -> None:
    assert "nano" in MODELS and "nano-gec" in READERS and "nano-diffusion" in DIFFUSING
    for name in (*MODELS, *READERS, *DIFFUSING):
        assert (assets.path(name) / "model.safetensors").stat().st_size <= 20e6
        card = (assets.path(name) / "README.md").read_text()
        assert all(part in card for part in ("## Data", "## Validation over time", "## Train it again", "licence"))


def test_embedded_heads_are_small_and_have_cards() -> None:
    folders = [assets.ROOT / name for name in assets.HEADS.values()]
    assert sum(file.stat().st_size for folder in folders for file in folder.glob("*.safetensors")) <= 6e6
    for folder in folders:
        card = (folder / "README.md").read_text()
        assert all(part in card for part in ("## Data", "## Validation over time", "## Train it again", "licence"))


@pytest.mark.parametrize("block", [4, *(pytest.param(block, marks=pytest.mark.slow) for block in (8, 32))])
@pytest.mark.parametrize("name", DIFFUSING)
def test_several_canvases_change_no_token(name: str, block: int) -> None:
    """Of stories and an edit, in a batch, against plain forwards over the whole text."""
    model, tokenizer = load(name, runs=CANVASES)
    texts = [case.text for case in cases(None, None, None)][:2] + ["one day"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    layout = Layout(**model.config.canvas_config).of_length(block)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)]
    chooser = Chooser(LogitsProcessorList())
    rule = registry.load("canvas.policies", "low-confidence")
    expected = [
        step_by_step(partial(plain, model), layout, prompt, 24, rule, chooser, frozenset([0])).text
        for prompt in prompts
    ]
    for draft in registry.names("canvas.speculators"):
        fast: Any = truedraft.accelerate(model, tokenizer, draft=f"{draft}:canvases=6", control="fixed")
        out = fast.generate(**inputs, max_new_tokens=24, block_length=block)[:, inputs.input_ids.shape[1] :].tolist()
        assert [row[: len(text)] for row, text in zip(out, expected, strict=True)] == expected
        assert fast.report().acceptance_rate > 0.03


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", assets.HEADS)
@pytest.mark.parametrize("hidden", [256, 512])
def test_embedded_heads_draft_for_nano_and_for_nano_stretched(method: str, hidden: int) -> None:
    """By the name of the method alone; more than every second pass has an accepted token."""
    model, tokenizer = loaded("nano")
    prompts = [case.text for case in cases(None, None, None)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    given = dict(max_new_tokens=40, do_sample=False)
    expected = generated(model, inputs, **given).text
    target = model if hidden == 256 else stretched(model, layers=7, hidden=hidden)
    for draft in (method, f"{method}:{assets.HEADS[method]}"):
        fast = truedraft.accelerate(target, tokenizer, draft=draft, control="fixed")
        assert torch.equal(fast.generate(**inputs, **given), expected)
        assert fast.report().mean_acceptance_length > 1.5


def test_embedded_heads_are_for_nano_alone() -> None:
    for model in (loaded("nano-draft")[0], tiny("llama", torch.float32)):
        with pytest.raises(truedraft.Refused, match="needs a head"):
            truedraft.accelerate(model, draft="eagle3")
    with pytest.raises(truedraft.Refused, match="was trained for another model"):
        truedraft.accelerate(loaded("nano-draft")[0], draft="eagle3:nano-eagle3")


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
    given = dict(max_new_tokens=14, do_sample=False)
    expected = generated(model, inputs, **given).text
    small = loaded("nano-draft")[0]
    fast = truedraft.accelerate(model, tokenizer, draft=drafter(draft, model, small=small), control="fixed")
    assert torch.equal(fast.generate(**inputs, **given), expected)


@pytest.mark.parametrize(("name", "draft"), [(name, draft) for draft in FREE for name in READERS])
def test_drafts_change_no_token_of_an_edit(name: str, draft: str) -> None:
    model, tokenizer = loaded(name)
    lines = (assets.ROOT / "prompts" / "mistakes.txt").read_text().splitlines()
    inputs = tokenizer(lines, return_tensors="pt", padding=True, return_token_type_ids=False)
    given = dict(max_new_tokens=24, do_sample=False)
    fast = truedraft.accelerate(model, tokenizer, draft=draft, control="fixed")
    assert torch.equal(fast.generate(**inputs, **given), generated(model, inputs, **given).text)
