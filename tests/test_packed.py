"""Packed matrices: what they stand for, with and without compiled code, and as tensors of torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from truedraft.runtime import native

pytest.importorskip("torchao.utils", reason="torchao is not installed")
from truedraft.runtime.packed import PackedTensor


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
