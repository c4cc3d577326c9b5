"""Gemma 3n with its parts for images and sounds, whose towers need packages that are not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel, Gemma3nConfig, Gemma3nForConditionalGeneration
from transformers.models.gemma3n import modeling_gemma3n

import truedraft
from models import ARCHITECTURES, V
from truedraft.runtime import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
IMAGES, SOUNDS = 45, 53  # first tokens of each
ROWS = torch.tensor([[0, 0, 5, IMAGES + 1, SOUNDS, V - 1], [7, SOUNDS - 1, 9, IMAGES, 10, 11]])
GIVEN = dict(input_ids=ROWS, attention_mask=(ROWS != 0).long(), max_new_tokens=24, pad_token_id=0, eos_token_id=None)


class _WithoutTowers:
    @staticmethod
    def from_config(config: Any) -> torch.nn.Module:
        text = config.model_type == "gemma3n_text"
        return AutoModel.from_config(config) if text else torch.nn.Identity()  # type: ignore[no-any-return]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(modeling_gemma3n, "AutoModel", _WithoutTowers)
    config = Gemma3nConfig(
        text_config={**ARCHITECTURES["gemma3n_text"], "vocab_size_per_layer_input": IMAGES},
        vision_config=dict(hidden_size=16, vocab_size=SOUNDS - IMAGES, vocab_offset=IMAGES),
        audio_config=dict(hidden_size=16, vocab_size=V - SOUNDS, vocab_offset=SOUNDS),
    )
    torch.manual_seed(0)
    made = Gemma3nForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
            elif name.endswith("correct_output_scale"):
                parameter.normal_(1.0, 0.3)
    return made


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
def test_tokens_of_images_and_sounds_are_read_as_the_model_does(model: Any, sample: bool) -> None:
    """In prompts and in the text that follows; after changes of what their embeddings are made of, too."""
    fast = truedraft.accelerate(model, control="fixed")
    assert fast.target.fallback_reason is None
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(model.generate(**GIVEN, do_sample=sample))
        torch.manual_seed(3)
        assert torch.equal(fast.generate(**GIVEN, do_sample=sample), texts[-1])
        with torch.no_grad():
            model.model.embed_vision.embedding_projection.weight.mul_(-1)
    assert not torch.equal(*texts)
