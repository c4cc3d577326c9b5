"""Weights that are kept in panels alone: the same bits, half the memory, and a model that still answers."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

pytest.importorskip("torchao.utils", reason="torchao is not installed")

import truedraft
from models import ragged, tiny
from truedraft.errors import Refused
from truedraft.runtime import native
from truedraft.runtime.panels import panels
from truedraft.runtime.processors import processor
from truedraft.runtime.released import PanelTensor, release_weights
from truedraft.runtime.weights import Weight

pytestmark = pytest.mark.skipif(
    native.library() is None or "avx512f" not in processor(), reason="compiled passes make no copies on this machine"
)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 96), (16, 16), (130, 48)])
def test_it_is_the_matrix_that_was_given(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape).to(dtype)
    kept = PanelTensor(panels(Weight(matrix, None, None)).values, *shape, dtype)
    assert torch.equal(kept.dequantize(), matrix) and kept.shape == shape and kept.dtype == dtype
    x = torch.randn(2, 5, shape[1]).to(dtype)
    bias = torch.randn(shape[0]).to(dtype)
    expected = nn.functional.linear(x, matrix, bias)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = nn.functional.linear(x, kept, bias)
        assert (found - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.1) * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "phi3", "mixtral", "qwen3_next"])
def test_texts_have_the_same_bits(architecture: str, dtype: torch.dtype) -> None:
    model = tiny.__wrapped__(architecture, dtype)
    given = dict(**ragged(model, 3), max_new_tokens=9, do_sample=False, pad_token_id=0)
    scores = dict(return_dict_in_generate=True, output_logits=True)
    before = truedraft.accelerate(model, strict=True).generate(**given, **scores)
    fast = truedraft.accelerate(model, release_weights=True)
    linears = [module.weight for module in model.modules() if type(module) is nn.Linear]
    assert any(isinstance(weight, PanelTensor) for weight in linears)
    after = fast.generate(**given, **scores)
    assert "compiled pass" in fast.report().runtime
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(one, other) for one, other in zip(before.logits, after.logits, strict=True))
    if dtype == torch.float32:
        assert torch.equal(model.generate(**given), after.sequences), "its own generate goes on"


def test_what_an_embedding_shares_stays() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    model.lm_head.weight = model.model.embed_tokens.weight
    weights = sum(m.weight.nbytes for m in model.modules() if type(m) is nn.Linear and m is not model.lm_head)
    assert release_weights(model) == weights > 0 == release_weights(model)
    assert type(model.lm_head.weight.data) is torch.Tensor


def test_weights_are_let_go() -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    before = {id(part.weight) for part in layer}
    release_weights(layer)
    gc.collect()
    assert before.isdisjoint(id(kept) for kept in gc.get_objects() if isinstance(kept, nn.Parameter))


def test_drafts_of_views_with_fewer_bits() -> None:
    model = tiny.__wrapped__("llama", torch.float32)
    given = dict(**ragged(model, 2), max_new_tokens=9, do_sample=False, pad_token_id=0)
    expected = model.generate(**given)
    fast = truedraft.accelerate(model, draft="int8-self", release_weights=True)
    assert torch.equal(fast.generate(**given), expected)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(Refused, match="training mode"):
        truedraft.accelerate(tiny.__wrapped__("llama", torch.float32).train(), release_weights=True)
