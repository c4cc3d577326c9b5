"""Checkpoints of learned heads: shards, damage, layouts of others, and the names by which they are used."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from foreign import FORMATS
from foreign.common import save
from truedraft import Refused, accelerate, registry
from truedraft.drafters.heads._layouts import UNREAD

METHODS = {"eagle": "eagle", "eagle3": "eagle3", "eagle3-speculators": "eagle3", "medusa-2": "medusa"}


def module_of(method: str, folder: Path, target: PreTrainedModel) -> torch.nn.Module:
    drafter: Any = registry.load("drafters", method, model=str(folder))
    accelerate(target, draft=drafter)
    return drafter.heads if method == "medusa" else drafter.head


def refusal(method: str, folder: Path, target: PreTrainedModel) -> str:
    with pytest.raises(Refused) as error:
        module_of(method, folder, target)
    text = str(error.value)
    assert str(folder) in text and "\n" not in text and "Traceback" not in text
    return text


def whole(folder: Path) -> dict[str, Tensor]:
    (file,) = [f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin", ".pt")]
    weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    file.unlink()
    return weights


def sharded(folder: Path, kind: str) -> dict[str, list[str]]:
    """Split the weights of a folder into shards of a few tensors, in the order of their names: shard -> its names."""
    weights = whole(folder)
    stem, ending = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[kind]
    names = sorted(weights)
    parts = [names[first : first + 3] for first in range(0, len(names), 3)]
    shards = {f"{stem}-{i:05}-of-{len(parts):05}.{ending}": part for i, part in enumerate(parts, 1)}
    for file, part in shards.items():
        some = {name: weights[name].clone().contiguous() for name in part}
        save_file(some, folder / file) if kind == "safetensors" else torch.save(some, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / f"{stem}.{ending}.index.json").write_text(json.dumps(index))
    return shards


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("name", METHODS)
def test_shards_are_read_as_one_file(name: str, kind: str, tmp_path: Path) -> None:
    target = FORMATS[name].target()
    FORMATS[name].write(tmp_path, target, 0)
    expected = module_of(METHODS[name], tmp_path, target).state_dict()
    assert len(sharded(tmp_path, kind)) > 3
    found = module_of(METHODS[name], tmp_path, target).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_shards_without_tensors_of_the_heads_are_not_opened(kind: str, tmp_path: Path) -> None:
    """Medusa-2 has its heads beside a whole model."""
    target = FORMATS["medusa-2"].target()
    FORMATS["medusa-2"].write(tmp_path, target, 0)
    expected = module_of("medusa", tmp_path, target).state_dict()
    shards = sharded(tmp_path, kind)
    others = [file for file, names in shards.items() if not any("medusa" in name for name in names)]
    assert len(others) > 3
    for file in others:
        (tmp_path / file).write_bytes(b"no tensors")
    found = module_of("medusa", tmp_path, target).state_dict()
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    (needed,) = [file for file, names in shards.items() if "medusa_head.0.0.linear.weight" in names]
    (tmp_path / needed).unlink()
    assert f"lacks {needed}, in which its index places weights: download all of it" in refusal(
        "medusa", tmp_path, target
    )


def _without_index(folder: Path, shards: dict[str, list[str]]) -> None:
    (folder / "model.safetensors.index.json").unlink()


def _index(content: str) -> Callable[[Path, dict[str, list[str]]], None]:
    def damage(folder: Path, shards: dict[str, list[str]]) -> None:
        (folder / "model.safetensors.index.json").write_text(content)

    return damage


def _other_shard(folder: Path, shards: dict[str, list[str]]) -> None:
    first, second, *_ = shards
    (folder / second).write_bytes((folder / first).read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_index, "has shards, as model-00001-of-00005.safetensors, without their index"),
        (_index("{"), "model.safetensors.index.json cannot be read"),
        (_index("[]"), "model.safetensors.index.json cannot be read"),
        (_index("{}"), "model.safetensors.index.json cannot be read"),
        (_index('{"weight_map": []}'), "model.safetensors.index.json cannot be read"),
        (_index('{"weight_map": {"fc.weight": 3}}'), "model.safetensors.index.json cannot be read"),
        (_index('{"weight_map": {"fc.weight": "../x.safetensors"}}'), "it names files outside of the folder"),
        (_other_shard, "lacks midlayer.hidden_norm.weight, which the index places there"),
    ],
)
def test_damaged_shards_are_refused(damage: Callable[..., None], message: str, tmp_path: Path) -> None:
    target = FORMATS["eagle3"].target()
    FORMATS["eagle3"].write(tmp_path, target, 0)
    damage(tmp_path, sharded(tmp_path, "safetensors"))
    assert message in refusal("eagle3", tmp_path, target)


# ---------------------------------------------------------------- damage


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "its config.json is no JSON: download it again"),
        ("config.json", b"\xff\xfe", "its config.json is no JSON"),
        ("config.json", b"[" * 10**5, "its config.json is no JSON"),
        ("config.json", b"[1]", "its config.json is no JSON object"),
        ("model.safetensors", b"", "model.safetensors cannot be read"),
        ("model.safetensors", None, "model.safetensors cannot be read"),
        ("pytorch_model.bin", b"", "pytorch_model.bin cannot be read"),
        ("pytorch_model.bin", None, "pytorch_model.bin cannot be read"),
        ("pytorch_model.bin", [torch.ones(3)], "it holds a list, not tensors by name"),
        ("pytorch_model.bin", {"state": {"a": torch.ones(3)}}, "it holds more than tensors by name"),
        ("pytorch_model.bin", Harmful(), "pytorch_model.bin cannot be read"),
    ],
)
@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_damaged_files_are_refused(
    method: str, file: str, content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None cuts the file short."""
    monkeypatch.chdir(tmp_path)
    target = FORMATS[method].target()
    folder = FORMATS[method].write(tmp_path / "head", target, 0)
    if file != "config.json":
        weights = whole(folder)
        if file.endswith(".bin"):
            torch.save(weights, folder / file)
        else:
            save_file({n: w.clone().contiguous() for n, w in weights.items()}, folder / file)
    if content is None:
        content = (folder / file).read_bytes()[:-100]
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        torch.save(content, folder / file)
    if method == "medusa" and file == "config.json":
        pytest.skip("its files say all that its configuration says")
    assert message in refusal(method, folder, target)
    assert not (tmp_path / "harmed").exists()


def test_a_file_of_an_older_torch_is_read(tmp_path: Path) -> None:
    """Its format cannot be mapped into memory."""
    target = FORMATS["eagle"].target()
    folder = FORMATS["eagle"].write(tmp_path, target, 0)
    expected = module_of("eagle", folder, target).state_dict()
    torch.save(whole(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert pickle.loads((folder / "pytorch_model.bin").read_bytes()[:20]), "a plain pickle, no zip"
    found = module_of("eagle", folder, target).state_dict()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("method", ["eagle", "eagle2", "eagle3", "medusa"])
def test_an_empty_folder_is_refused(method: str, tmp_path: Path) -> None:
    target = FORMATS["eagle"].target()
    assert "has no weights: it needs one of model.safetensors" in refusal(method, tmp_path, target)


@pytest.mark.parametrize(
    ("method", "name", "changed", "message"),
    [
        ("eagle", "fc.weight", lambda w: w.to(torch.int8), "has fc.weight as int8"),
        ("eagle", "fc.weight", lambda w: w[0], "fc.weight (64,) instead of (32, 64)"),
        ("eagle3", "norm.weight", lambda w: w.to(torch.int8), "has norm.weight as int8"),
        ("eagle3", "fc.weight", lambda w: w[0], "it lacks the matrix fc.weight"),
        ("eagle3", "d2t", lambda w: w.float(), "its d2t is (41,) of torch.float32, not a row of whole numbers"),
        ("eagle3", "d2t", lambda w: w[:, None], "its d2t is (41, 1) of torch.int64, not a row of whole numbers"),
        ("eagle3", "t2d", lambda w: w[:, None].expand(-1, 2), "its d2t and t2d name different tokens"),
        ("eagle3", "lm_head.weight", lambda w: w.to(torch.int8), "has lm_head.weight as int8"),
        ("medusa", "0.0.linear.weight", lambda w: w.to(torch.int8), "has blocks.0.0.weight as int8"),
        ("medusa", "0.1.weight", lambda w: w[0], "lm_heads.0.weight (32,) instead of (97, 32)"),
        ("medusa", "0.1.weight", lambda w: w[:50], "lm_heads.0.weight (50, 32) instead of (97, 32)"),
    ],
)  # fmt: skip
def test_tensors_of_another_type_or_shape_are_refused(
    method: str, name: str, changed: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    target = FORMATS[method].target()
    folder = FORMATS[method].write(tmp_path, target, 0)
    weights = whole(folder)
    weights[name] = changed(weights[name]).contiguous()
    save_file({n: w.clone() for n, w in weights.items()}, folder / "model.safetensors")
    assert message in refusal(method, folder, target)


# ---------------------------------------------------------------- layouts

LAYOUTS: dict[str, list[tuple[str, dict[str, Any]]]] = {  # a tensor and a configuration, as public code writes them
    "P-EAGLE": [
        ("mask_hidden", {}),
        ("fc.weight", {"architectures": ["PEagleDraftModel"]}),
        ("fc.weight", {"speculators_model_type": "peagle"}),
    ],
    "DeepSpec's EAGLE-3": [("layers.0.hidden_norm.weight", {"architectures": ["Qwen3Eagle3Model"]})],
    "EAGLE-3 with latent attention": [("midlayer.o_proj.weight", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]})],
    "EAGLE-3 of several layers by SGLang": [("additional_layers.0.mlp.up_proj.weight", {})],
    "EAGLE by early releases of speculators": [("fusion_fc.weight", {})],
    "GRIFFIN": [("fc.fc.weight", {}), ("model.fc.fc.bias", {})],
    "Medusa by TensorRT-LLM": [("medusa_heads.0.medusa_layers.0.linear.weight", {})],
    "ReDrafter": [("rnn_u.weight", {})],
    "Arctic's LSTM speculator": [("speculator.forget_emb.0.weight", {}), ("projs.0.weight", {})],
    "DFlash 2": [("candidate_selector.predecessor_codebook", {})],
    "DSpark": [("markov_head.markov_w1.weight", {}), ("fc.weight", {"architectures": ["Qwen3DSparkModel"]})],
    "Domino": [("prefix_gru.weight_ih_l0", {"dflash_config": {"projector_type": "domino"}})],
    "Gemma's assistant": [("pre_projection.weight", {})],
    "PARD": [("layers.0.mlp.up_proj.weight", {"pard_token": 9})],
    "PARD-2": [("layers.0.mlp.up_proj.weight", {"pard2_target_layers": [-1], "pard_token": 9})],
    "UNO": [("base.lora_A.weight", {"uno_mask_token_id": 9})],
}


def test_every_unread_layout_has_its_case() -> None:
    assert LAYOUTS.keys() == {layout.name for layout in UNREAD}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_are_not_read_are_named(layout: str, tmp_path: Path) -> None:
    target = FORMATS["eagle"].target()
    for i, (name, config) in enumerate(LAYOUTS[layout]):
        folder = tmp_path / str(i)
        save(
            folder, config, {name: torch.ones(2, 2), "layers.0.hidden_norm.weight": torch.ones(2)}, "model.safetensors"
        )
        for method, known in (("eagle", "SafeAILab's"), ("eagle3", "SpecForge's, speculators'")):
            text = refusal(method, folder, target)
            assert text.startswith(
                f"{method}: '{folder}' is in the layout of {layout}, which is not read here: give {known}"
            )


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("method", sorted(set(METHODS.values())))
def test_checkpoint_of_another_method_is_refused_with_its_name(method: str, name: str, tmp_path: Path) -> None:
    target = FORMATS[name].target()
    FORMATS[name].write(tmp_path, target, 0)
    if METHODS[name] == method:
        module_of(method, tmp_path, target)
    else:
        assert f"of another method: give it as draft='{METHODS[name]}:{tmp_path}'" in refusal(method, tmp_path, target)
