"""The two formats of GPTQ, told apart by the zero points themselves, and the check of what was loaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantised
import truedraft
from truedraft import Refused
from truedraft.errors import Note
from truedraft.loading import load
from truedraft.runtime.checkpoints.sanity import SHARE, TEXT

pytest.importorskip("torchao.utils", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.*could not stay integers", "ignore:.*predicts plain English")

LABELS = ({}, {"checkpoint_format": "gptq"}, {"checkpoint_format": "gptq_v2"}, {"format": "gptq_v2"})
KINDS: dict[str, dict[str, Any]] = {
    "four bits": dict(bits=4),
    "eight bits": dict(bits=8),
    "two bits": dict(bits=2),
    "four bits, asymmetric": dict(bits=4, symmetric=False),
    "eight bits, asymmetric": dict(bits=8, symmetric=False),
    "two bits, asymmetric": dict(bits=2, symmetric=False),
    "by activations": dict(bits=4, act_order=True),
    "asymmetric, by activations": dict(bits=4, symmetric=False, act_order=True),
}


def settings_of(bits: int, label: dict[str, Any], **given: Any) -> dict[str, Any]:
    found = quantised.gptq_settings(bits)
    del found["checkpoint_format"]
    return {**found, **label, **given}


@pytest.mark.parametrize("label", LABELS, ids=str)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_points_are_read_by_their_numbers(kind: str, version: int, label: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the name of the format says; a name that is wrong is said once."""
    bits = KINDS[kind]["bits"]
    weights = quantised.write_folder(
        tmp_path, quantised.plain(), quantised.gptq(version=version, **KINDS[kind]), settings_of(bits, label)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Note)
        model, _ = truedraft.load(str(tmp_path))
    for name, weight in weights.items():
        found = model.get_parameter(name).data
        assert torch.equal(found.dequantize() if hasattr(found, "qdata") else found, weight), name
    named, shown = next(iter(label.values()), None), {1: "gptq", 2: "gptq_v2"}[version]
    said = [str(one.message) for one in caught if "zero points" in str(one.message)]
    assert len(said) == (named not in (None, shown))
    assert all(f"says {named}, but its zero points are those of {shown}: read as {shown}" in text for text in said)


def test_numbers_that_show_nothing_leave_the_name(tmp_path: Path) -> None:
    """Weights whose mean is far from zero: either reading may be meant."""
    model = quantised.plain()
    for version, label in ((1, "gptq"), (2, "gptq_v2"), (1, None)):
        settings = settings_of(4, {} if label is None else {"checkpoint_format": label})
        quantise = quantised.gptq(symmetric=False, version=version)
        weights = quantised.write_folder(tmp_path, model, lambda w, r, q=quantise: q(w + 0.5 * w.std(), r), settings)
        found, _ = truedraft.load(str(tmp_path))
        assert all(torch.equal(found.get_parameter(name).data.dequantize(), w) for name, w in weights.items())


def test_other_packings_are_refused(tmp_path: Path) -> None:
    for changes, message in (
        ({"pack_dtype": "int16"}, "GPTQ packed in int16, which is not read here: save it packed in int32"),
        ({"format": "marlin"}, "GPTQ in the layout 'marlin'"),
    ):
        quantised.write_folder(tmp_path, quantised.plain(), quantised.gptq(), settings_of(4, changes))
        with pytest.raises(Refused, match=message):
            truedraft.load(str(tmp_path))


@pytest.mark.parametrize("version", [1, 2])
def test_settings_in_a_file_of_their_own(version: int, tmp_path: Path) -> None:
    """As AutoGPTQ wrote them, with another name of the weights, and no name of the method or the format."""
    weights = quantised.write_folder(tmp_path, quantised.plain(), quantised.gptq(version=version), {})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"bits": 4, "group_size": quantised.GROUP, "damp_percent": 0.01, "desc_act": False, "sym": True}
    own |= {"true_sequential": True, "model_name_or_path": None, "model_file_base_name": "gptq_model-4bit-64g"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(own))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit-64g.safetensors")
    model, _ = truedraft.load(str(tmp_path))
    assert all(torch.equal(model.get_parameter(name).data.dequantize(), w) for name, w in weights.items())
    (tmp_path / "quantize_config.json").write_text("[1]")
    with pytest.raises(Refused, match=r"quantize_config\.json is no JSON object: download it again"):
        truedraft.load(str(tmp_path))


def test_settings_of_awq_in_a_file_of_their_own(tmp_path: Path) -> None:
    weights = quantised.write_folder(tmp_path, quantised.plain(), quantised.awq, {})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"zero_point": True, "q_group_size": quantised.GROUP, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(own))
    model, _ = truedraft.load(str(tmp_path))
    assert all(torch.equal(model.get_parameter(name).data.dequantize(), w) for name, w in weights.items())


# ---------------------------------------------------------------- the check of what was loaded


def write_nano(folder: Path, quantise: quantised.Quantiser, settings: dict[str, Any]) -> None:
    model, _ = load("nano")
    quantised.write_folder(folder, model, quantise, settings, dtype="float32")


def said_of(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Note)
        load(str(folder))
    return [str(one.message) for one in caught if "predicts" in str(one.message)]


def test_a_model_that_reads_is_not_warned_of(tmp_path: Path) -> None:
    write_nano(tmp_path, quantised.gptq(bits=4), quantised.gptq_settings(4))
    assert said_of(tmp_path) == []
    write_nano(tmp_path, quantised.awq, quantised.AWQ_SETTINGS)
    assert said_of(tmp_path) == []


DAMAGE: dict[str, Any] = {
    "scales": lambda t: t * 4,
    "qzeros": lambda t: t ^ 0x33333333,
    "qweight": lambda t: t.flip(-1),
}


@pytest.mark.parametrize("part", DAMAGE)
@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_weights_that_are_read_wrongly_are_noticed(format: str, part: str, tmp_path: Path) -> None:
    """Scales of another unit, other zero points, words in another order: all load without an error."""
    if format == "gptq":
        write_nano(tmp_path, quantised.gptq(bits=4, symmetric=False), quantised.gptq_settings(4))
    else:
        write_nano(tmp_path, quantised.awq, quantised.AWQ_SETTINGS)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: DAMAGE[part](t) if name.endswith(part) else t for name, t in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (said,) = said_of(tmp_path)
    assert said.startswith(f"MODEL {str(tmp_path)!r}: it predicts plain English with a perplexity of ")
    assert "(a blind guess among its tokens has 4,096)" in said and "read wrongly" in said


def test_scales_that_are_no_numbers_are_noticed(tmp_path: Path) -> None:
    write_nano(tmp_path, quantised.gptq(bits=4), quantised.gptq_settings(4))
    tensors = load_file(tmp_path / "model.safetensors")
    (name, *_) = [name for name in tensors if name.endswith("scales")]
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (said,) = said_of(tmp_path)
    assert "it predicts no numbers" in said


def test_the_limit_is_far_from_models_that_read() -> None:
    """By the model's own loss on the text, which `transformers` computes."""
    model, tokenizer = load("nano")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    loss = float(model(ids, labels=ids).loss.detach())
    assert loss < 0.75 * SHARE * float(torch.tensor(float(model.config.vocab_size)).log())
