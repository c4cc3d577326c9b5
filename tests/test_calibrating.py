"""Calibrations of views: measures against plain forwards, searches on models with a layer that does nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import truedraft
from models import ragged, tiny
from test_views import LAYERS, cut, deep
from truedraft import Refused, registry
from truedraft.accelerated import Accelerated
from truedraft.calibrating import TextEvaluator
from truedraft.cli import main
from truedraft.views import _bayesian
from truedraft.views._base import Reduction, View
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
    found = view.calibrate(evaluator, lines.append)["layers"]
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


class Scored:
    """An evaluator of a model of four layers; `score` gives the goodput and the loss of what a view leaves out.

    stop: Ctrl-C at this measurement.
    """

    layers = 4
    subjects: dict[str, Scored]

    def __init__(self, score: Callable[[Reduction], float], stop: int = 10**9):
        self.score, self.stop, self.measured = score, stop, list[Reduction]()
        self.subjects = {}

    def goodput(self, view: View, least: float = 0.0) -> float:
        self.measured.append(view.reduction(self.layers))
        if len(self.measured) == self.stop:
            raise KeyboardInterrupt
        return self.score(self.measured[-1])

    loss = goodput

    def states(self) -> Iterator[torch.Tensor]:
        yield from torch.eye(3)

    def similarities(self) -> Iterator[torch.Tensor]:
        for layer in range(self.layers):
            if layer == self.stop:
                raise KeyboardInterrupt
            yield torch.full((5,), 0.5 + layer / 10)


def with_subjects(score: Callable[[Reduction], float], stop: int = 10**9) -> Scored:
    evaluator = Scored(score, stop)
    evaluator.subjects = {name: Scored(score, stop) for name in ("tales", "sums")}
    return evaluator


def halves(found: Reduction) -> float:
    """The more halves are skipped, the faster: but without layer 0 nothing is right."""
    return 0.3 if 0 in found.attention | found.feed_forward else 1 + len(found.attention) + len(found.feed_forward)


SEARCHES = ["sleb:share=0.5", "d3", "draft-and-verify:trials=14", "knn-ssd:trials=14,centroids=1", "ffn-skipllm:ends=0"]


@pytest.mark.parametrize("name", SEARCHES)
def test_every_calibration_says_how_far_it_is_and_can_end_after_each_step(name: str, tmp_path: Path) -> None:
    view: CalibratedLayers = registry.load("views", name)
    steps = list(view.steps(with_subjects(halves)))
    shares = [step.share for step in steps]
    assert len(steps) > 3 and shares == sorted(shares) and 0 <= shares[0] < 1 and shares[-1] == 1
    assert steps[-1].record is not None and any(step.text for step in steps)
    file = tmp_path / "found.json"
    for record in (step.record for step in steps if step.record is not None):
        file.write_text(json.dumps({**record, "fingerprint": "1"}))
        assert registry.load("views", f"{name.partition(':')[0]}:file={file}").layers == record["layers"] != ""


@pytest.mark.parametrize("name", ["draft-and-verify", "knn-ssd"])
def test_a_hopeless_search_ends_early_and_says_why(name: str) -> None:
    evaluator, view = with_subjects(lambda found: 0.4), registry.load("views", name)
    reason = r"none drafts faster than the whole model alone.*, emits 0\.40: draft by another"
    with pytest.raises(Refused, match=reason):
        list(view.steps(evaluator))
    assert 10 < len(evaluator.measured) <= _bayesian.HOPELESS < view.trials
    assert not any(subject.measured for subject in evaluator.subjects.values())


def test_a_subject_that_can_spare_nothing_drafts_by_the_set_of_all() -> None:
    evaluator = with_subjects(halves)
    evaluator.subjects["sums"].score = lambda found: 0.4
    record = registry.load("views", "knn-ssd:trials=14,centroids=1").calibrate(evaluator)
    assert record["subjects"]["sums"]["layers"] == record["layers"] != ""


@pytest.mark.parametrize(
    ("name", "stop"), [("sleb:share=0.5", 4), ("d3", 4), ("draft-and-verify", 9), ("knn-ssd:centroids=1", 9)]
)
def test_ctrl_c_keeps_the_best_so_far(
    name: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluator = with_subjects(halves, stop)
    monkeypatch.setattr("truedraft.cli.calibrate._evaluator", lambda *_: evaluator)
    given, out = data_of(tmp_path)
    assert main(["calibrate", name, *given]) == 130
    emitted = capsys.readouterr()
    assert emitted.err == "interrupted: the best that was found is kept\n" and "use it as --draft" in emitted.out
    assert (
        registry.load("views", f"{name.partition(':')[0]}:file={out}").layers == json.loads(out.read_text())["layers"]
    )


@pytest.mark.parametrize(("name", "stop"), [("sleb", 2), ("ffn-skipllm", 2), ("draft-and-verify", 1)])
def test_ctrl_c_before_anything_was_found_writes_nothing(
    name: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluator = with_subjects(halves, stop)
    monkeypatch.setattr("truedraft.cli.calibrate._evaluator", lambda *_: evaluator)
    given, out = data_of(tmp_path)
    assert main(["calibrate", name, *given]) == 130
    assert capsys.readouterr().err == "interrupted before anything was found: nothing is written\n" and not out.exists()


def data_of(folder: Path) -> tuple[list[str], Path]:
    """Arguments with two files of texts, and the file to write."""
    out, data = folder / "found.json", [folder / "tales.txt", folder / "sums.txt"]
    for file in data:
        file.write_text("once upon a time there was a dog\nthe cat sat on a mat\n")
    return ["--target", "nano-draft", "--out", str(out), *(part for f in data for part in ("--data", str(f)))], out


@pytest.mark.parametrize(("name", "kept"), [("d3:ends=0", True), ("draft-and-verify", False), ("knn-ssd", False)])
def test_minutes_end_a_calibration(
    name: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock that goes on by a minute at each step."""
    now = iter(range(0, 10**6, 60))
    monkeypatch.setattr("truedraft.cli.calibrate.time.monotonic", lambda: next(now))
    given, out = data_of(tmp_path)
    assert main(["calibrate", name, *given, "--minutes", "9" if kept else "0.5"]) == (0 if kept else 2)
    emitted = capsys.readouterr()
    if kept:
        assert "9 minutes are over: the best that was found is kept" in emitted.err
        assert len(json.loads(out.read_text())["layers"].split(";")) < 3
    else:
        assert "found nothing in 0.5 minutes: give more --minutes" in emitted.err and not out.exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--out", "/nowhere/found.json"], "/nowhere is no folder that can be written"),
        (["--out", "/tmp"], "--out /tmp is a folder"),
        (["--out", "x", "--minutes", "0"], "--minutes 0: give a number above 0"),
        (["--out", "x", "--minutes", "nan"], "--minutes nan"),
    ],
)
def test_a_calibration_refuses_before_any_work(
    given: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "texts.txt"
    data.write_text("once upon a time\n")
    assert main(["calibrate", "sleb", "--target", "nano-draft", "--data", str(data), *given]) == 2
    assert words in capsys.readouterr().err


def test_a_set_that_falls_far_behind_is_not_measured_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = idle(2), list[int]()
    evaluator = TextEvaluator(model, [TEXTS[0]] * 6)
    whole = evaluator.goodput(View())
    generate = Accelerated.generate
    monkeypatch.setattr(Accelerated, "generate", lambda *a, **k: (calls.append(1), generate(*a, **k))[1])
    assert evaluator.goodput(SkipLayers("2"), whole) > whole and len(calls) == 6, "one that is better is"
    calls.clear()
    assert evaluator.goodput(SkipLayers("0;1;3"), 4.0) < 2 and len(calls) == 1
