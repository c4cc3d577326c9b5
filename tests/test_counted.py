"""Models whose own forward counts keys by their index in the cache: nodes of a tree are given their positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import truedraft
from arrivals import COUNTED
from models import ragged, tiny
from nets import RULES, node_net, text_net
from truedraft import Refused

LIMIT = 128  # positions of the tiny models


@pytest.mark.covering(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["oracle", "noise", "token-recycling"])
@pytest.mark.parametrize(
    ("architecture", "runtime"), [*((name, "stock") for name in COUNTED), ("bloom", "auto"), ("gpt_neo", "auto")]
)
def test_text_up_to_the_last_position(architecture: str, runtime: str, name: str, rule: str) -> None:
    """Passes near the end reach past a model's tables; texts are longer than local windows."""
    model = tiny(architecture, torch.float32)
    inputs = ragged(model, 3)
    steps = LIMIT + 1 - inputs["input_ids"].shape[1]
    text_net(model, name, inputs, max_new_tokens=steps, pad_token_id=0, runtime=runtime, **RULES[rule])


@pytest.mark.parametrize("architecture", ["mpt", "gpt_neo"])
def test_texts_past_the_last_position_are_refused(architecture: str) -> None:
    fast = truedraft.accelerate(tiny(architecture, torch.float32))
    with pytest.raises(Refused, match="max_new_tokens to at most 126"):
        fast.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=127, do_sample=False)


@pytest.mark.parametrize("name", ["oracle", "view"])
def test_falcon_by_eager_attention(name: str) -> None:
    model: Any = tiny("falcon_alibi", torch.float32, attention="eager")
    assert node_net(model, name, tolerance=1e-4) > 20
