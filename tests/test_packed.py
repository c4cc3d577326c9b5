"""Packed matrices: what they stand for, with and without compiled code, and as tensors of torch."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import packing
from test_kernels import FORMS, in_blocks
from truedraft.runtime import native
from truedraft.runtime.identity import fingerprint
from truedraft.targets.decoder import DecoderTarget
from truedraft.tree import Prompt, Taps

pytest.importorskip("torchao.utils", reason="torchao is not installed")
from truedraft.runtime.packed import BlocksTensor, PackedTensor


def integers(bits: int, out: int = 37, width: int = 96, groups: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    most = 1 << (bits - 1)
    values = torch.randint(-most, most, (out, width)).to(torch.int8)
    return values, torch.rand(out, groups), torch.randn(out, groups)


@pytest.mark.parametrize("built", [True, False], ids=["compiled", "torch alone"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
def test_it_stands_for_its_integers(bits: int, offset: bool, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not built:
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("the compiled pass was not built on this machine")
    values, scales, offsets = integers(bits)
    packed = PackedTensor.of_integers(values, scales, offsets if offset else None)
    expected = values * scales.repeat_interleave(32, 1) + (offsets.repeat_interleave(32, 1) if offset else 0)
    assert torch.equal(packed.dequantize(), expected) and packed.shape == (37, 96)
    assert packed.qdata.numel() * packed.qdata.element_size() == 48 * 96 * bits // 8
    x = torch.randn(2, 5, 96)
    assert torch.equal(nn.functional.linear(x, packed), nn.functional.linear(x, expected))
    halves = PackedTensor.of_integers(values, scales.half().float())
    assert packed.scale.dtype == torch.float32 and halves.scale.dtype == torch.float16
    assert torch.equal(halves.dequantize(), values * scales.half().float().repeat_interleave(32, 1))


def test_it_is_the_weight_of_a_layer() -> None:
    values, scales, _ = integers(4)
    layer = nn.Linear(96, 37, dtype=torch.bfloat16)
    packed = PackedTensor.of_integers(values, scales, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    expected = nn.functional.linear(x, packed.dequantize(), layer.bias)
    assert expected.dtype == torch.bfloat16
    for same in (layer, copy.deepcopy(layer)):
        assert torch.equal(same(x), expected) and torch.equal(same.weight.detach().dequantize(), packed.dequantize())


def test_unequal_groups_are_refused() -> None:
    values, _, _ = integers(4)
    with pytest.raises(ValueError, match="5 groups of 96 columns"):
        PackedTensor.of_integers(values, torch.rand(37, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", FORMS)
def test_embeddings_in_blocks_are_the_rows_of_their_matrix(kind: str, dtype: torch.dtype) -> None:
    """For torch, for compiled passes, and where a model is compared with others."""
    if not native.takes_blocks():
        pytest.skip("this processor has no products of blocks")
    blocks = in_blocks(FORMS[kind], 61, 256)
    rows, ids = blocks.matrix().to(dtype), torch.randint(61, (3, 200))
    kept = BlocksTensor(packing.packed(blocks), blocks.form, 61, 256, dtype)
    assert torch.equal(nn.functional.embedding(ids, kept), rows[ids])
    assert torch.equal(kept[::3], rows[::3]) and torch.equal(kept[:, 1:5], rows[:, 1:5]) and torch.equal(kept, rows)
    with pytest.raises(IndexError):
        nn.functional.embedding(torch.tensor([61]), kept)  # which its last panel has
    sizes = dict(vocab_size=61, hidden_size=256, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval().to(dtype)
    model.model.embed_tokens.weight = nn.Parameter(rows, requires_grad=False)
    before = fingerprint(model)
    model.model.embed_tokens.weight = nn.Parameter(kept, requires_grad=False)
    assert fingerprint(model) == before
    target = DecoderTarget(model)
    assert target.fallback_reason is None
    target.taps = Taps((0,))
    target.reserve(1, 64)
    found = target.prefill([Prompt(ids[0, :40])]).features(0, (0,), (0,))
    assert torch.equal(found, rows[ids[0, :40]])


@pytest.mark.parametrize("kind", FORMS)
def test_rows_of_a_file_are_packed_as_they_are(kind: str) -> None:
    """In two parts, the second of which ends within a panel; by the numbers that the package of GGUF reads."""
    if not native.takes_blocks():
        pytest.skip("this processor has no products of blocks")
    gguf = pytest.importorskip("gguf")
    type_, library = gguf.GGMLQuantizationType[kind], native.library()
    columns, size = gguf.GGML_QUANT_SIZES[type_]
    rows = numpy.random.default_rng(3).integers(0, 256, (61, 512 // columns * size), numpy.uint8)
    parts = [torch.from_numpy(rows[:48]), torch.from_numpy(rows[48:])]
    found = BlocksTensor.of_file(int(type_), FORMS[kind], parts, 61, 512, torch.float32).dequantize()
    with numpy.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(rows, type_))
    assert expected.isfinite().float().mean() > 0.5  # the rest has scales that are no numbers
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    for wrong in [(99, 61, 512), (-1, 61, 512), (int(type_), 0, 512), (int(type_), 61, 500)]:
        assert library.truedraft_pack_blocks(wrong[0], rows.ctypes.data, *wrong[1:], rows.ctypes.data)  # type: ignore
