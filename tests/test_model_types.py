"""Every model type of the installed `transformers` is hosted exactly or refused, as listed in docs/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest

import truedraft
from model_types import classes, outcome, stated
from test_canvas_subset import model_of as subset_model
from test_renoise import model_of as renoising_model
from truedraft.canvas.renoised import AcceleratedRenoise
from truedraft.canvas.subset import AcceleratedSubset

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
COMMON = {
    ("gemma3", "Gemma3ForConditionalGeneration"): "compiled",
    ("llava", "LlavaForConditionalGeneration"): "compiled",
    ("mistral3", "Mistral3ForConditionalGeneration"): "compiled",
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): "compiled",
    ("voxtral", "VoxtralForConditionalGeneration"): "compiled",
    ("aya_vision", "AyaVisionForConditionalGeneration"): "compiled",
    ("codegen", "CodeGenForCausalLM"): "compiled",
    ("persimmon", "PersimmonForCausalLM"): "own forward",
    ("git", "GitForCausalLM"): "own forward",  # without padding, which changes its output
    ("idefics", "IdeficsForVisionText2Text"): "refused",  # needs an image
    ("paligemma", "PaliGemmaForConditionalGeneration"): "refused",  # attends to later tokens, unless there is padding
}


@pytest.mark.parametrize(("kind", "name"), COMMON)
def test_multimodal_models_are_hosted_for_text(kind: str, name: str) -> None:
    assert outcome(kind, name)[0] == COMMON[kind, name]


def test_the_page_has_every_class() -> None:
    found = stated(PAGE.read_text())
    assert set(found) == set(classes()), "run python tools/models.py"
    assert all(found[key] == expected for key, expected in COMMON.items())


def test_models_that_are_hosted_another_way() -> None:
    """Those that the page names, and no others, are what `accelerate` has classes of their own for."""
    models = {renoising_model(): AcceleratedRenoise, subset_model(): AcceleratedSubset}
    assert all(type(truedraft.accelerate(model)) is kind for model, kind in models.items())
    found = {key for key, outcome in stated(PAGE.read_text()).items() if outcome == "another way"}
    assert found == {(model.config.model_type, type(model).__name__) for model in models}


@pytest.mark.slow(reason="builds all of some 330 model classes")
@pytest.mark.parametrize(("kind", "name"), classes())
def test_every_type_is_hosted_exactly_or_refused(kind: str, name: str) -> None:
    assert outcome(kind, name)[0] == stated(PAGE.read_text())[kind, name], "run python tools/models.py"
