"""Quantised weights: read as torchao keeps them, the quantised model is the target, what cannot be is refused."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import truedraft
from models import ARCHITECTURES, ragged, tiny
from test_runtime import assert_same_bits
from truedraft import Refused
from truedraft.cli import main
from truedraft.cli._models import load
from truedraft.runtime import QUANTIZED, native
from truedraft.runtime.quantize import quantize
from truedraft.targets.decoder import DecoderTarget

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
compiled = pytest.mark.skipif(native.library() is None, reason="the compiled pass was not built on this machine")
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EVERY = pytest.mark.parametrize("architecture", ["llama", "phi3", "starcoder2"])  # apart, fused, without a gate


def fresh(architecture: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model wide enough for several groups in a row."""
    torch.manual_seed(11)
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**{**ARCHITECTURES[architecture], **sizes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model.to(dtype).eval()


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the plain weights that the quantised ones stand for."""
    same = copy.deepcopy(model)
    for layer in same.modules():
        if hasattr(layer, "weight") and hasattr(layer.weight, "qdata"):
            layer.weight = torch.nn.Parameter(layer.weight.dequantize())
    return same


@compiled
@EVERY
@BOTH
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantised_weights_are_used_as_stored(architecture: str, dtype: torch.dtype, kind: str) -> None:
    """The forward with plain weights but for rounding, and the same bits at any width."""
    model = fresh(architecture, dtype)
    before = model(torch.arange(20)[None]).logits
    quantize(model, kind)
    target = DecoderTarget(model)
    assert target.fallback_reason is None and target.runtime.startswith("compiled pass")
    assert_same_bits(target, seeds=1)
    ids = torch.arange(20)[None]
    stock = dequantised(model)(ids).logits.float()
    assert not torch.equal(stock, before.float())
    target.reserve(1, 32)
    read = target.prefill([truedraft.tree.Prompt(ids[0])]).logits
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    assert (read[0, 0] - stock[0, -1]).abs().max() < tolerance * stock.std()


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "seeded"])
def test_text_is_that_of_the_quantised_model(kind: str, sample: bool) -> None:
    model = fresh()
    fast = truedraft.accelerate(model, control="fixed", quantize=kind)
    given = dict(**ragged(model, 5), max_new_tokens=40, do_sample=sample, pad_token_id=0)
    torch.manual_seed(3)
    plain = dequantised(model).generate(**given)
    for quantised in (fast, model):
        torch.manual_seed(3)
        assert torch.equal(quantised.generate(**given), plain)


@BOTH
@pytest.mark.parametrize("kind", QUANTIZED)
def test_packed_weights_are_those_of_torchao(dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, kept = fresh(dtype=dtype), fresh(dtype=dtype)
    quantize(packed, kind)
    with monkeypatch.context() as patched:
        patched.setattr("truedraft.runtime.quantize._pack", lambda model: None)
        quantize(kept, kind)
    for name, weight in kept.named_parameters():
        if hasattr(weight, "qdata"):
            assert torch.equal(packed.get_parameter(name).dequantize(), weight.dequantize())


@compiled
@BOTH
def test_layers_may_be_quantised_in_several_ways(dtype: torch.dtype) -> None:
    """One with offsets, one in eight bits and one plain: the text is that of their matrices."""
    from truedraft.runtime.packed import PackedTensor

    model = fresh(dtype=dtype)
    for number, layer in enumerate(model.modules()):
        if isinstance(layer, torch.nn.Linear) and number % 3:
            most = 1 << (7 if number % 2 else 3)
            values = torch.randint(-most, most, layer.weight.shape).to(torch.int8)
            scales = torch.rand(len(values), values.shape[1] // 32) * 0.3 / most
            offsets = scales * torch.randint(-4, 4, scales.shape) if number % 5 else None
            packed = PackedTensor.of_integers(values, scales, offsets, dtype)
            layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    target = DecoderTarget(model)
    assert target.fallback_reason is None
    assert_same_bits(target, seeds=1)
    ids = torch.arange(20)[None]
    target.reserve(1, 32)
    read = target.prefill([truedraft.tree.Prompt(ids[0])]).logits[0, 0]
    expected = dequantised(model)(ids).logits[0, -1].float()
    assert (read - expected).abs().max() < (2e-5 if dtype == torch.float32 else 0.1) * expected.std()


def test_quantised_activations_use_the_forward_of_the_model() -> None:
    model = fresh()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    target = DecoderTarget(model)
    assert target.fallback_reason is not None and (native.library() is None or "activations" in target.fallback_reason)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_command_quantises(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load("nano", quantize=kind)
    assert model.lm_head.weight.qdata.dtype == {"int8": torch.int8, "int4": torch.int32}[kind]
    prompt = tokenizer("one day", return_tensors="pt")
    expected = dequantised(model).generate(**prompt, max_new_tokens=24, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert main(["generate", "nano", "one day", "--max-new-tokens", "24", "--json", "--quantize", kind]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected.tolist()


def test_unsupported_quantisation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="choose one of int8, int4"):
        truedraft.accelerate(fresh(), quantize="int3")
    with pytest.raises(Refused, match="reads 48 numbers"):
        quantize(tiny("llama", torch.float32), "int4")
    model = fresh()
    quantize(model, "int8")
    with pytest.raises(Refused, match="quantised already"):
        truedraft.accelerate(model, quantize="int8")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(Refused, match=r"pip install 'truedraft\[quantize\]'"):
        quantize(fresh(), "int8")
