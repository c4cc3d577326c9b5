"""Calibrations of views: measures against plain forwards, searches on models with a layer that does nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, tiny
from test_views import LAYERS, cut, deep
from truedraft import Refused, registry
from truedraft.calibrating import TextEvaluator
from truedraft.cli import main
from truedraft.views._base import View
from truedraft.views._calibrated import CalibratedLayers
from truedraft.views.skip_layers import SkipLayers
from truedraft.views.sleb import Sleb

TEXTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 3, 4, 3], [20]]
KNOBS: dict[str, dict[str, Any]] = {
    "sleb": {"share": 0.25},
    "draft-and-verify": {"trials": 24},
    "knn-ssd": {"trials": 24},
}
OTHERS = {"knn-ssd", "ffn-skipllm"}  # that search as draft-and-verify does, or no layers to skip
CALIBRATED = [
    n for n in registry.names("views") if "calibration" in registry.method("views", n).card.needs and n not in OTHERS
]


def idle(layer: int) -> Any:
    """A model in which the given layer adds nothing."""
    model: Any = copy.deepcopy(tiny("llama", torch.float32, sharpen=4.0, layers=LAYERS))
    for linear in (model.model.layers[layer].self_attn.o_proj, model.model.layers[layer].mlp.down_proj):
        torch.nn.init.zeros_(linear.weight)
    return model


@pytest.mark.parametrize("skipped", [(), (1,), (2, 3)])
def test_the_loss_is_that_of_a_cut_model(skipped: tuple[int, ...]) -> None:
    model = deep("llama", torch.float32)
    plain, total, count = cut(model, skipped), 0.0, 0
    for text in TEXTS[:2]:
        with torch.no_grad():
            logits = plain(torch.tensor([text])).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum"))
        count += len(text) - 1
    view = SkipLayers(";".join(map(str, skipped))) if skipped else View()
    assert TextEvaluator(model, TEXTS).loss(view) == pytest.approx(total / count, rel=1e-4)


def test_goodput_counts_the_weights_that_are_read() -> None:
    model = idle(2)
    evaluator = TextEvaluator(model, TEXTS[:1])
    assert evaluator.goodput(View()) == pytest.approx(32 / (4 + 28), rel=0.03), "each drafted token costs a pass"
    rest = 1 - sum(p.numel() for p in model.model.layers[2].parameters()) / (
        sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    )
    assert evaluator.target.share(SkipLayers("2")) == pytest.approx(rest)
    assert evaluator.goodput(SkipLayers("2")) == pytest.approx(32 / (4 + 28 * rest), rel=0.03)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_that_does_nothing_is_found(name: str, layer: int, tmp_path: Path) -> None:
    model = idle(layer)
    view: CalibratedLayers = registry.method("views", name)(**KNOBS.get(name, {}))
    lines: list[str] = []
    texts = model.generate(**ragged(model, 4), max_new_tokens=40, do_sample=False)[:, -40:].tolist()  # its likeliest
    evaluator = TextEvaluator(model, texts)
    found = view.search(evaluator, lines.append)
    assert str(layer) in {part.rstrip("af") for part in found.split(";")} and lines
    if name == "d3":
        assert found.split(";")[0] == str(layer)
        return
    assert evaluator.goodput(SkipLayers(found)) > evaluator.goodput(View()) + 0.05
    draft = registry.load("drafters", f"{name}:layers={found}")
    report = truedraft.accelerate(model, draft=draft, control="fixed")
    report.generate(**ragged(model, 2), max_new_tokens=20, do_sample=False)
    assert report.report().acceptance_rate and report.report().mean_acceptance_length > 4


def test_depth_decays_along_a_draft() -> None:
    """Layers are skipped in the order that was found, and drafts do not change the text."""
    view = registry.load("views", "d3:layers=2;1,alpha=0.7")
    skipped = [sorted(view.at(depth).reduction(4).layers) for depth in range(4)]
    assert skipped == [[1, 2], [1, 2], [1, 2], [1, 2]]
    view = registry.load("views", "d3:layers=2;1,alpha=0.85")
    assert [sorted(view.at(depth).reduction(4).layers) for depth in range(4)] == [[2], [1, 2], [1, 2], [1, 2]]
    model = tiny("llama", torch.float32, sharpen=4.0, layers=LAYERS)
    fast = truedraft.accelerate(model, draft="d3:layers=2;1,alpha=0.85,depth=3", control="fixed")
    inputs = ragged(model, 3)
    plain = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    assert torch.equal(fast.generate(**inputs, max_new_tokens=20, do_sample=False), plain)
    assert fast.report().acceptance_rate


def test_a_calibration_is_of_one_model(tmp_path: Path) -> None:
    file, model = tmp_path / "found.json", tiny("llama", torch.float32, layers=LAYERS)
    with pytest.raises(Refused, match=r"sleb has no layers to skip: `truedraft calibrate sleb"):
        truedraft.accelerate(model, draft="sleb")
    file.write_text(json.dumps({"layers": "1", "fingerprint": "another"}))
    with pytest.raises(
        Refused, match=r"sleb was calibrated for another model \(a model, fingerprint another; .*\): calibrate it"
    ):
        truedraft.accelerate(model, draft=f"sleb:file={file}")
    for wrong in ("{}", "no json", json.dumps({"layers": "x", "fingerprint": "1"})):
        file = tmp_path / f"{len(wrong)}.json"
        file.write_text(wrong)
        with pytest.raises(Refused, match=r"is no file of `truedraft calibrate`"):
            truedraft.accelerate(model, draft=f"sleb:file={file}")
    with pytest.raises(Refused, match="at least two tokens"):
        TextEvaluator(model, [[1]])


def test_the_command_writes_what_drafts_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "texts.txt", tmp_path / "sleb.json"
    data.write_text("once upon a time there was a dog\nthe cat sat on a mat\n")
    given = ["--target", "nano-draft", "--data", str(data), "--out", str(out)]
    assert main(["calibrate", "sleb:share=0.5,ends=0", *given]) == 0
    assert "use it as --draft sleb:file=" in capsys.readouterr().out
    assert isinstance(registry.load("views", f"sleb:file={out}"), Sleb)
    assert main(["generate", "nano-draft", "once", "--max-new-tokens", "4", "--draft", f"sleb:file={out}"]) == 0
    assert main(["calibrate", "skip-layers", *given]) != 0
    assert "skip-layers has nothing to calibrate" in capsys.readouterr().err
