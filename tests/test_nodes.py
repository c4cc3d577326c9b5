"""Nodes net: a pass over trees gives every node the logits of a plain forward over its path."""

from __future__ import annotations

import pytest
import torch

from models import ARCHITECTURES, NO_FP64, RECURRENT, tiny
from nets import COMPILED as BY_COMPILED_PASS
from nets import EVERY, model_for, needs_of, node_net
from truedraft.runtime.programs import PROGRAMS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str) -> None:
    exact = architecture not in NO_FP64
    dtype, tolerance = (torch.float64, 1e-6) if exact else (torch.float32, 1e-4)
    assert node_net(tiny(architecture, dtype), "oracle", tolerance=tolerance) > 50


# Those in NO_FP64 are held above in fp32 by their compiled passes, those with states in test_recurrent.py.
COMPILED = [(name, torch.float32) for name in PROGRAMS if name not in NO_FP64 | RECURRENT.keys()]
COMPILED += [(name, torch.bfloat16) for name in PROGRAMS]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("architecture", "dtype"), COMPILED, ids=lambda value: str(value).removeprefix("torch."))
def test_dtypes(architecture: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and architecture in ("afmoe", "gpt_oss", "kolibri1", "phimoe"):
        pytest.skip("in bf16 a near-tie of experts may be decided differently, and its experts differ much")
    # unsharpened: in bf16 the mask and positions are tested, not the error growth of large weights
    model = tiny(architecture, dtype, sharpen=1.0)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    name = "oracle" if dtype == torch.float32 else "noise"
    if dtype == torch.bfloat16:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "equal", lambda *_: True)  # in bf16 ties may change the text; only nodes are tested
            assert node_net(model, name, tolerance=tolerance, steps=6) >= 20
    else:
        assert node_net(model, name, tolerance=tolerance, steps=6) >= 20


@pytest.mark.parametrize("name", EVERY)
def test_every_drafter(name: str) -> None:
    of_fp32 = name in BY_COMPILED_PASS or "experts" in needs_of(name)
    dtype, tolerance = (torch.float32, 1e-4) if of_fp32 else (torch.float64, 1e-6)
    assert node_net(model_for(name, dtype), name, tolerance=tolerance, steps=8) > 15


def test_eager_attention_over_a_sliding_window() -> None:
    # fp32: in fp64 transformers' eager sliding windows differ between left-padded and single prompts
    assert node_net(tiny("mistral", torch.float32, attention="eager"), "oracle", tolerance=1e-4) > 50
