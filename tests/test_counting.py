"""Decoders that take no positions and count padding: exact for prompts without it, in trees and beside other rows."""

from __future__ import annotations

import pytest
import torch

import truedraft
from models import COUNTING, V, ragged, tiny
from nets import PROCESSORS, RULES, node_net, text_net
from truedraft import Refused

FP32 = torch.float32
EVERY = pytest.mark.parametrize("architecture", COUNTING)


def level(rows: int) -> dict[str, torch.Tensor]:
    """Prompts of one length, each with a repeated phrase."""
    phrases = torch.randint(3, V, (rows, 4), generator=torch.Generator().manual_seed(6))
    ids = phrases.repeat(1, 3)[:, :9]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@EVERY
def test_every_node_has_the_logits_of_its_path(architecture: str) -> None:
    for name in ("oracle", "noise"):
        assert node_net(tiny(architecture, FP32), name, tolerance=1e-4, inputs=level(3)) > 30


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_text(architecture: str, rule: str) -> None:
    """Rows of several requests, up to the last position; one row, which needs no mask; and with penalties."""
    model, settings = tiny(architecture, FP32), {"do_sample": False, "pad_token_id": 0, **RULES[rule]}
    text_net(model, "oracle", level(3), max_new_tokens=128 - 8, runtime="stock", **settings)
    text_net(model, "suffix", level(1), max_new_tokens=30, **settings)
    text_net(model, "noise", level(2), max_new_tokens=20, **settings, **PROCESSORS["penalties"])


def test_padding_and_texts_past_the_last_position_are_refused() -> None:
    for architecture in COUNTING:
        fast = truedraft.accelerate(tiny(architecture, FP32))
        with pytest.raises(Refused, match="padding changes this model's text"):
            fast.generate(**ragged(fast.model, 2), max_new_tokens=4)
        with pytest.raises(Refused, match="max_new_tokens to at most 120"):
            fast.generate(**level(1), max_new_tokens=121)
