"""Compiled linear layers in models without a program: same text, same bits at any width, removed afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import truedraft
from models import ragged, tiny
from truedraft.runtime import linears, native
from truedraft.runtime.forward import ForwardPass, LinearsPass
from truedraft.runtime.linears import Linears
from truedraft.runtime.panels import Int8Copies
from truedraft.runtime.programs import PROGRAMS
from truedraft.targets.decoder import DecoderTarget

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
WITHOUT_PROGRAM = ["mpt", "persimmon"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "SMALLEST", 0)


def replaced(model: nn.Module) -> int:
    return sum("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("architecture", WITHOUT_PROGRAM)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
def test_text_is_that_of_model_generate(architecture: str, sample: bool) -> None:
    assert architecture not in PROGRAMS
    model = tiny(architecture, torch.float32)
    seen: list[int] = []
    hook = model.register_forward_hook(lambda *_: seen.append(replaced(model)))
    fast = truedraft.accelerate(model, control="fixed")
    assert isinstance(fast.target.runner, LinearsPass)
    given = dict(**ragged(model, 5), max_new_tokens=30, do_sample=sample, pad_token_id=0)
    torch.manual_seed(3)
    plain = model.generate(**given)
    torch.manual_seed(3)
    seen.clear()
    assert torch.equal(fast.generate(**given), plain)
    hook.remove()
    assert min(seen) > 0 and replaced(model) == 0
    assert "compiled linear layers (there is no program for" in fast.report().runtime


@BOTH
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_has_the_same_bits_at_any_width(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(80, 53, bias=bias).to(dtype)
    x = torch.randn(200, 80, dtype=dtype)
    with torch.no_grad():
        expected = layer(x)
        with Linears(layer).compiled():
            whole = layer(x)
            for width in (*range(1, 14), 16, 65):
                assert torch.equal(layer(x[:width]), whole[:width])
            assert torch.equal(layer(x.view(2, 4, 25, 80)), whole.view(2, 4, 25, 53))
    assert replaced(layer) == 0 and whole.dtype == dtype
    torch.testing.assert_close(whole, expected, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-5)


def test_gradients_are_those_of_torch_and_new_weights_are_used() -> None:
    layer = nn.Linear(32, 16)
    layers, x = Linears(layer), torch.randn(3, 32)
    with layers.compiled():
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    layer.weight = nn.Parameter(torch.zeros(16, 32))
    layers.refresh()
    with torch.no_grad(), layers.compiled():
        assert torch.equal(layer(x), layer.bias.expand(3, 16))
        layer.weight += 1  # in place
        torch.testing.assert_close(layer(x), x.sum(1, keepdim=True) + layer.bias)
        assert layer(torch.zeros(0, 32)).shape == (0, 16)
        layer.bias += 2  # a copy of it is read
    layers.refresh()
    with torch.no_grad(), layers.compiled():
        torch.testing.assert_close(layer(x), x.sum(1, keepdim=True) + layer.bias)


@BOTH
def test_copies_in_int8_are_the_rounded_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, copies = nn.Linear(80, 53).to(dtype), Int8Copies()
    with torch.no_grad():
        layer.weight[7] = 0
    layers, x = Linears(layer, copies), torch.randn(5, 80, dtype=dtype)
    for _ in range(2):
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(1, keepdim=True) / 127
        rounded = ((weight / scale).round() * scale).nan_to_num(0.0)
        expected = nn.functional.linear(x.float(), rounded, layer.bias.float()).to(dtype)
        assert len(copies) == 1
        with torch.no_grad(), layers.compiled():
            torch.testing.assert_close(layer(x), expected, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-5)
            layer.weight *= torch.linspace(0.5, 2, 80).to(dtype)
        layers.refresh()


def test_unsupported_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Linear):
        pass

    assert len(Linears(Other(32, 32))) == 0
    assert len(Linears(nn.Linear(30, 32))) == 0  # the kernels read sixteen numbers at a time
    assert len(Linears(nn.Linear(32, 32, dtype=torch.float64))) == 0
    monkeypatch.setattr(native, "library", lambda: None)
    assert len(Linears(nn.Linear(32, 32))) == 0
    assert type(DecoderTarget(tiny("persimmon", torch.float32)).runner) is ForwardPass


def test_the_stock_runtime_replaces_nothing() -> None:
    model = tiny("persimmon", torch.float32)
    fast = truedraft.accelerate(model, runtime="stock")
    seen: list[int] = []
    hook = model.register_forward_hook(lambda *_: seen.append(replaced(model)))
    fast.generate(torch.tensor([[5, 6]]), max_new_tokens=4)
    hook.remove()
    assert set(seen) == {0} and fast.report().runtime == "transformers forward"
