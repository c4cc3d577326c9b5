"""A draft model on another device than the target; memory plans of two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import truedraft
from models import ragged, sibling, tiny
from nets import SEED, generated, needs_of
from truedraft import Refused, loading, registry
from truedraft.cli import main
from truedraft.planning.parts import peak
from truedraft.planning.plan import Plan, planned

HERE = Path(__file__).parent
NAMES = [n for n in registry.names("drafters") if {"draft model", "diffusion model"} & set(needs_of(n))]
OTHERS = ["rejection", "moves", "estimates", "target far", "overlapped far"]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@cache
def errors() -> dict[str, str]:
    """Of the cases of placed.py."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, HERE / "placed.py"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", [*NAMES, *OTHERS])
def test_a_draft_model_on_a_second_device(case: str) -> None:
    """Simulated: an operation over tensors of both devices is an error, as on a GPU."""
    assert errors()[case] == ""


@GPU
@pytest.mark.parametrize("name", ["draft-model", "opt-tree", "pearl"])
def test_a_draft_model_on_a_gpu(name: str) -> None:
    model = tiny(dtype=torch.float32)
    small = sibling(model)
    moved = type(small)(small.config).to("cuda").eval()
    moved.load_state_dict(small.state_dict())
    fast = truedraft.accelerate(model, draft=registry.load("drafters", name, model=moved), control="fixed")
    inputs = ragged(model, 2)
    for sample in (False, True):
        given = {"max_new_tokens": 30, "pad_token_id": 0, "do_sample": sample}
        torch.manual_seed(SEED)
        assert torch.equal(fast.generate(**inputs, **given), generated(model, inputs, **given).text)


def test_a_name_ends_with_the_device_to_load_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine@cuda").mkdir()
    split = {
        name: loading.split(name) for name in ("nano", "nano@cpu", "a/b@cuda:1", "a@b/c", "a/b@v2", "mine@cuda", "@cpu")
    }
    assert split == {
        "nano": ("nano", None), "nano@cpu": ("nano", "cpu"), "a/b@cuda:1": ("a/b", "cuda:1"), "a@b/c": ("a@b/c", None),
        "a/b@v2": ("a/b@v2", None), "mine@cuda": ("mine@cuda", None), "@cpu": ("@cpu", None),
    }  # fmt: skip
    assert loading.check("nano-draft@cpu") == loading.check("nano-draft")
    draft = registry.load("drafters", "draft-model:nano-draft@cpu,length=3")
    assert draft.model.device == torch.device("cpu") and draft.model.dtype == torch.float32
    with pytest.raises(Refused, match="no device xpu:7 here; give nano-draft@cpu"):
        registry.load("drafters", "draft-model:nano-draft@xpu:7")


def plan(draft: str, monkeypatch: pytest.MonkeyPatch, free: dict[str, int], **given: object) -> Plan:
    monkeypatch.setattr(loading, "device_of", lambda name, _: torch.device(loading.split(name)[1] or "cpu"))
    return planned("nano", draft, rows=2, tokens=300, free=free.__getitem__, **given)  # type: ignore[arg-type]


def test_memory_is_planned_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft model takes on a device of its own is not taken where the target is."""
    free = {"cpu": 4 << 30, "cuda:1": 1 << 30}
    alone, both, apart = (
        plan(draft, monkeypatch, free) for draft in ("none", "draft-model:nano-draft", "draft-model:nano-draft@cuda:1")
    )
    there = {part.name: part.bytes for part in apart.parts if part.device == "cuda:1"}
    before = {part.name: part.bytes for part in both.parts}
    assert {part.device for part in both.parts} == {"cpu"} and not both.beside
    assert {*there} == {"draft weights", "draft KV cache", "draft buffers", "draft prompts", "draft logits"}
    for name in ("draft weights", "draft KV cache"):
        assert there[name] == before[name] > 0
    (moved,) = (part for part in apart.parts if part.name == "moved logits")
    vocabulary = loading.config_of(loading.check("nano"), "nano", "MODEL").vocab_size
    assert moved.device == "cpu" and moved.bytes >= 3 * 2 * vocabulary * 4, "logits of two rows, scores and laws"
    held = [part for part in apart.parts if part.device == "cuda:1"]
    assert apart.beside == {"cuda:1": (peak(held), 1 << 30)}
    assert alone.needed <= apart.needed < both.needed - there["draft weights"]


def test_a_device_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = "draft-model:nano-draft@cuda:1"
    whole = plan(draft, monkeypatch, {"cpu": 4 << 30, "cuda:1": 1 << 30})
    ((needed, _),) = whole.beside.values()
    whole.check()
    small = plan(draft, monkeypatch, {"cpu": 4 << 30, "cuda:1": needed - 1})
    assert not small.fits and small.rows == 1, "a smaller batch would fit"
    with pytest.raises(Refused, match="the draft model on cuda:1 needs"):
        small.check()
    with pytest.raises(Refused, match="more than the"):
        plan(draft, monkeypatch, {"cuda:1": 1 << 30}, memory=1 << 20).check()


def test_the_plan_names_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(loading, "device_of", lambda name, _: torch.device(loading.split(name)[1] or "cpu"))
    monkeypatch.setattr("truedraft.targets.memory.free_memory", lambda device: (4 if device.type == "cpu" else 1) << 30)
    assert main(["plan", "nano", "--draft", "draft-model:nano-draft@cuda:1", "--tokens", "300"]) == 0
    printed = capsys.readouterr().out
    assert "Needed at once on cuda:1: " in printed and "of 1.00 GiB" in printed and "of 4.00 GiB" in printed
    assert main(["plan", "nano", "--draft", "draft-model:nano-draft", "--tokens", "300"]) == 0
    assert "cuda" not in capsys.readouterr().out
