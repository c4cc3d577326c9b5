"""The tokens that end a text, wherever a checkpoint's files name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, GenerationConfig

import quantised
import truedraft
from models import ARCHITECTURES, tiny
from served import running
from truedraft.loading import load, load_tokenizer
from truedraft.runtime.checkpoints import ends

NONE: dict[str, Any] = {}
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any], Any]] = {
    # generation_config.json (None: there is none), eos_token_id of config.json, what ends a text
    "a list in the generation config": ({"eos_token_id": [7, 9]}, {"eos_token_id": 5}, [7, 9]),
    "one in the generation config": ({"eos_token_id": 7}, {"eos_token_id": [5, 6]}, 7),
    "a list in the configuration": (None, {"eos_token_id": [5, 6]}, [5, 6]),
    "a list in the configuration, and a generation config without": (NONE, {"eos_token_id": [5, 6]}, [5, 6]),
    "one in the configuration, and a generation config without": ({"top_k": 9}, {"eos_token_id": 5}, 5),
    "the tokenizer's alone": (None, NONE, 0),
    "the tokenizer's, and a generation config without": ({"temperature": 0.5}, NONE, 0),
}


def write(folder: Path, case: str, packed: bool) -> Any:
    """A folder of a plain or a quantised checkpoint; returns the tokens that end its texts."""
    generation, config, expected = CASES[case]
    if packed:
        quantised.write_folder(folder, quantised.plain(), quantised.awq, quantised.AWQ_SETTINGS)
    else:
        quantised.plain().save_pretrained(folder)
        load_tokenizer("nano").save_pretrained(folder)
    found = json.loads((folder / "config.json").read_text())
    found = {name: value for name, value in found.items() if name != "eos_token_id"} | config
    (folder / "config.json").write_text(
        json.dumps(found if "eos_token_id" in found else {**found, "eos_token_id": None})
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return expected


@pytest.mark.filterwarnings("ignore:.*predicts plain English")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "quantised"])
@pytest.mark.parametrize("case", CASES)
def test_ends_are_those_that_the_files_name(case: str, packed: bool, tmp_path: Path) -> None:
    if packed:
        pytest.importorskip("torchao.utils", reason="torchao is not installed")
    expected = write(tmp_path, case, packed)
    model, tokenizer = truedraft.load(str(tmp_path))
    assert model.generation_config.eos_token_id == expected
    ids = tokenizer("one day", return_tensors="pt").input_ids
    text = truedraft.accelerate(model, tokenizer).generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(text, model.generate(ids, max_new_tokens=20, do_sample=False))


def test_a_text_stops_at_an_end_of_the_configuration_alone(tmp_path: Path) -> None:
    """As plain decoding does that is told so."""
    model, tokenizer = load("nano")
    given = dict(tokenizer("one day", return_tensors="pt", return_token_type_ids=False), max_new_tokens=20)
    ids = given["input_ids"]
    whole = model.generate(**given, do_sample=False)[0, ids.shape[1] :].tolist()
    model.config.eos_token_id = [4001, whole[6]]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    other, _ = load(str(tmp_path))
    fast = truedraft.accelerate(other, tokenizer)
    expected = model.generate(**given, do_sample=False, eos_token_id=[4001, whole[6]])
    assert expected.shape[1] < ids.shape[1] + 20
    assert torch.equal(fast.generate(**given, do_sample=False), expected)
    with running(fast) as server:
        assert server.server.model.end_ids == [4001, whole[6]]


def test_ends_of_the_language_model_of_a_multimodal_one() -> None:
    """The generation config and the outer configuration name none."""
    for kind, text in (("llava", "llama"), ("gemma3", "gemma3_text")):
        inner = CONFIG_MAPPING[text](**{**ARCHITECTURES["llama" if text == "llama" else text], "eos_token_id": [7, 9]})
        config = CONFIG_MAPPING[kind](text_config=inner.to_dict())
        config.eos_token_id = None
        model: Any = tiny()
        kept, model.generation_config = model.generation_config, GenerationConfig()
        try:
            ends.complete(model, load_tokenizer("nano"), config)
            assert model.generation_config.eos_token_id == [7, 9]
        finally:
            model.generation_config = kept


GGUF: dict[str, tuple[dict[str, Any], Any]] = {
    "one": ({"eos": 5}, 5),
    "of a text and a turn": ({"eos": 5, "eot": 7}, [5, 7]),
    "of a text, a turn and a message": ({"eos": 5, "eot": 7, "eom": 9}, [5, 7, 9]),
    "of a turn, twice": ({"eos": 5, "eot": 5}, 5),
}


@pytest.mark.filterwarnings("ignore:.*predicts plain English", "ignore:.*reads matrices of this architecture")
@pytest.mark.parametrize("case", GGUF)
def test_every_end_in_the_metadata_of_gguf(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    given, expected = GGUF[case]
    add = quantised._add_tokenizer

    def with_ends(writer: Any) -> None:
        add(writer)
        for name, token in given.items():
            writer.kv_data[-1].pop(f"tokenizer.ggml.{name}_token_id", None)
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)

    monkeypatch.setattr(quantised, "_add_tokenizer", with_ends)
    quantised.write_gguf(tmp_path / "m.gguf", quantised.plain(), "Q8_0")
    quantised.write_gpt2(tmp_path / "g.gguf")
    for file in ("m.gguf", "g.gguf"):
        model, tokenizer = truedraft.load(str(tmp_path / file))
        assert model.generation_config.eos_token_id == expected, file
        ids = tokenizer("one day", return_tensors="pt").input_ids
        text = truedraft.accelerate(model, tokenizer).generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(text, model.generate(ids, max_new_tokens=12, do_sample=False))


def test_names_of_the_metadata() -> None:
    fields = [
        ("tokenizer.ggml.eos_token_id", 2), ("tokenizer.ggml.eot_token_id", 7), ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eog_token_ids", [7, 8]), ("tokenizer.ggml.fim_sep_token_id", 11),
        ("tokenizer.ggml.eom_token_id", 9),
    ]  # fmt: skip
    assert ends.of_metadata(fields) == [2, 7, 8, 9]


def test_diffusion_models_keep_their_own() -> None:
    """Their texts end as their policies have it."""
    model, _ = load("nano-diffusion")
    assert model.generation_config.eos_token_id == GenerationConfig.from_model_config(model.config).eos_token_id
