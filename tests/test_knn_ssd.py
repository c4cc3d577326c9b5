"""Layers by subject: rows get the view of the nearest prompts that were calibrated, and draft as if they were alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import truedraft
from models import tiny
from test_views import COMPILED, LAYERS
from truedraft import DraftTree, Refused, registry
from truedraft.calibrating import TextEvaluator
from truedraft.cli import main
from truedraft.runtime.identity import fingerprint
from truedraft.tree import Row
from truedraft.views._calibrated import Step
from truedraft.views._layers import listed
from truedraft.views.knn_ssd import KnnSsd

GENERIC, LAYERS_OF = "1a", {"tales": "1", "sums": "2f;1f"}
PROMPTS = {"tales": [5, 6, 7, 8, 9], "sums": [20, 21, 22, 23, 24, 25, 26], "other": [40, 3]}


def last_states(model: PreTrainedModel) -> dict[str, Tensor]:
    """By prompt, the state after the final norm at its last token, by the model's own forward."""
    with torch.no_grad():
        return {
            name: model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
            for name, ids in PROMPTS.items()
        }


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("llama", torch.float32, sharpen=1.5, layers=LAYERS)


@pytest.fixture(scope="module")
def file(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration in which each subject is known by one prompt alone, beside a centroid that is nobody's."""
    states = last_states(model)
    subjects = {
        name: {"layers": layers, "anchors": [(states[name] + 50).tolist(), states[name].tolist()], "reach": 0.01}
        for name, layers in LAYERS_OF.items()
    }
    record = {"layers": GENERIC, "fingerprint": fingerprint(model), "subjects": subjects}
    path = tmp_path_factory.mktemp("knn") / "found.json"
    path.write_text(json.dumps(record))
    return path


def batch(names: Sequence[str]) -> dict[str, Tensor]:
    """Prompts, padded at the left."""
    width = max(len(PROMPTS[name]) for name in names)
    over = [width - len(PROMPTS[name]) for name in names]
    return {
        "input_ids": torch.tensor([[0] * n + PROMPTS[name] for n, name in zip(over, names, strict=True)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in over]),
    }


Drafts = dict[int, list[tuple[Any, Any, Any]]]


def recorded(draft: Any) -> Drafts:
    """By prompt's first token: the layers that a row drafts without, and its drafts."""
    seen: Drafts = {}
    propose = draft.propose

    def noted(rows: Sequence[Row], budget: Sequence[int]) -> list[DraftTree]:
        trees = propose(rows, budget)
        for row, tree in zip(rows, trees, strict=True):
            part = draft.view_of(row).reduction(LAYERS)
            seen.setdefault(row.tokens[0], []).append((part, tree.tokens, tree.parent))
        return trees

    draft.propose = noted
    return seen


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("runtime", [pytest.param("auto", marks=COMPILED), "stock"])
def test_each_row_drafts_by_its_subject_as_it_does_alone(
    model: PreTrainedModel, file: Path, runtime: str, sampled: bool
) -> None:
    names = ["tales", "other", "sums", "tales"]
    settings: dict[str, Any] = dict(max_new_tokens=25, do_sample=sampled, **({"top_k": 0} if sampled else {}))

    def texts_and_drafts(some: Sequence[str]) -> tuple[Tensor, Drafts]:
        draft = registry.load("drafters", f"knn-ssd:file={file},depth=4,top_k=2")
        fast = truedraft.accelerate(model, draft=draft, control="fixed", runtime=runtime)
        seen, inputs = recorded(draft), batch(some)
        torch.manual_seed(3)
        text = fast.generate(**inputs, **settings)
        torch.manual_seed(3)
        assert torch.equal(text, model.generate(**inputs, **settings)) and fast.report().acceptance_rate
        assert not draft._views, "rows that have ended are kept"
        return text, seen

    _, together = texts_and_drafts(names)
    for name in PROMPTS:
        parts = {part for part, _, _ in together[PROMPTS[name][0]]}
        assert parts == {listed(LAYERS_OF.get(name, GENERIC))}
        if not sampled and name != "tales":
            _, alone = texts_and_drafts([name])
            assert together[PROMPTS[name][0]] == alone[PROMPTS[name][0]]


def test_rows_that_arrive_and_leave_keep_their_views(model: PreTrainedModel, file: Path) -> None:
    draft = registry.load("drafters", f"knn-ssd:file={file}")
    seen, fast = recorded(draft), truedraft.accelerate(model, draft=draft, control="fixed")
    names = ["tales", "sums", "other", "sums", "tales", "other"]
    with fast.engine(max_rows=3, max_tokens=64) as engine:
        requests = [
            engine.add_request(torch.tensor(PROMPTS[name]), max_new_tokens=5 + 9 * (i % 3), do_sample=False)
            for i, name in enumerate(names)
        ]
        while engine.has_unfinished_requests():
            engine.step()
    for i, (name, request) in enumerate(zip(names, requests, strict=True)):
        plain = model.generate(torch.tensor([PROMPTS[name]]), max_new_tokens=5 + 9 * (i % 3), do_sample=False)
        assert request.tokens == plain[0, len(PROMPTS[name]) :].tolist()
        assert {part for part, _, _ in seen[PROMPTS[name][0]]} == {listed(LAYERS_OF.get(name, GENERIC))}


@COMPILED
def test_subjects_are_chosen_beside_another_view(model: PreTrainedModel, file: Path) -> None:
    draft = registry.load("drafters", f"knn-ssd:file={file}+int8-self")
    assert len(draft.view.alternatives) == 2
    seen, fast = recorded(draft), truedraft.accelerate(model, draft=draft, control="fixed")
    inputs = batch(["sums", "other"])
    text = fast.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(text, model.generate(**inputs, max_new_tokens=12, do_sample=False))
    for name in ("sums", "other"):
        (part,) = {part for part, _, _ in seen[PROMPTS[name][0]]}
        assert part.bits == 8 and part.feed_forward == listed(LAYERS_OF.get(name, GENERIC)).feed_forward


def test_states_are_those_of_a_plain_forward(model: PreTrainedModel) -> None:
    states = TextEvaluator(model, [[1, 2]], list(PROMPTS.values())).states()
    for mine, plain in zip(states, last_states(model).values(), strict=True):
        assert (mine - plain).abs().max() < 1e-4


def test_prompts_that_do_not_fit_the_context_are_left_out(
    tmp_path: Path, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    long = [5] * (truedraft.accelerate(model).target.context + 1)
    states = list(TextEvaluator(model, [[1, 2]], [long, PROMPTS["sums"], []]).states())
    assert len(states) == 1 and (states[0] - last_states(model)["sums"]).abs().max() < 1e-4
    given = ["--target", "nano-draft", "--out", str(tmp_path / "found.json")]
    for name, text in (("tales", "the cat sat on a mat\n"), ("sums", "one and two " * 900)):
        (tmp_path / f"{name}.txt").write_text(text)
        given += ["--data", str(tmp_path / f"{name}.txt")]
    assert main(["calibrate", "knn-ssd", *given]) == 2
    assert "no prompt of sums fits the model's context: give shorter texts" in capsys.readouterr().err


def test_subjects_are_summed_up_by_centroids() -> None:
    """Of three groups of prompts, far apart."""
    states = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    states += 100 * torch.eye(3, 8).repeat(20, 1)
    found = KnnSsd(centroids=3).clustered(states)
    anchors = torch.tensor(found["anchors"])
    means = torch.stack([states[i::3].mean(0) for i in range(3)])
    assert torch.cdist(anchors, means).amin(0).max() < 0.01 and len(anchors) == 3
    farthest = (states - means.repeat(20, 1)).norm(dim=1).max()
    assert found["reach"] == pytest.approx(float(farthest), abs=0.01)
    assert len(KnnSsd().clustered(states[:9])["anchors"]) <= 4


def test_a_calibration_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sets are those found on each file and on all of them; where none is found, that of all."""
    tales, sums, out = tmp_path / "tales.txt", tmp_path / "sums.txt", tmp_path / "found.json"
    tales.write_text("once upon a time there was a dog\nthe cat sat on a mat\n")
    sums.write_text("one and one\ntwo and two and two\nthree\n")
    counts: list[int] = []

    def spared(evaluator: Any, *_: Any) -> Iterator[Step]:
        counts.append(len(evaluator.texts))
        if not (layers := {5: "1", 2: "1f", 3: ""}[counts[-1]]):
            raise Refused("nothing")
        yield Step(0.5)
        yield Step(1.0, "", {"layers": layers})

    monkeypatch.setattr("truedraft.views.knn_ssd.spared", spared)
    given = ["--target", "nano-draft", "--out", str(out)]
    assert main(["calibrate", "knn-ssd", *given, "--data", str(tales), "--data", str(sums)]) == 0
    assert counts == [5, 2, 3] and "use it as --draft knn-ssd:file=" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert {name: subject["layers"] for name, subject in record["subjects"].items()} == {"tales": "1f", "sums": "1"}
    assert isinstance(registry.load("views", f"knn-ssd:file={out}"), KnnSsd)
    prompt = ["once upon a time there was a dog", "--max-new-tokens", "4", "--draft", f"knn-ssd:file={out}"]
    assert main(["generate", "nano-draft", *prompt]) == 0
    capsys.readouterr()
    assert main(["calibrate", "knn-ssd", *given, "--data", str(tales)]) != 0
    assert "knn-ssd chooses between subjects: give the texts of two or more, each its file" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tales.txt").write_text("a\n")
    assert main(["calibrate", "sleb", *given, "--data", str(tales), "--data", str(tmp_path / "other/tales.txt")]) != 0
    assert "two files of --data have one name" in capsys.readouterr().err


def test_files_of_others_are_refused(model: PreTrainedModel, file: Path, tmp_path: Path) -> None:
    record = json.loads(file.read_text())
    subjects: Any = record["subjects"]
    wrong = [
        {**record, "subjects": {}},
        {**record, "subjects": {**subjects, "x": {**subjects["sums"], "anchors": [[1.0]]}}},
        {**record, "subjects": {**subjects, "x": {**subjects["sums"], "layers": "?"}}},
        {key: record[key] for key in ("layers", "fingerprint")},
    ]
    for i, given in enumerate(wrong):
        path = tmp_path / f"{i}.json"
        path.write_text(json.dumps(given))
        with pytest.raises(Refused, match="is no file of `truedraft calibrate` for knn-ssd"):
            registry.load("views", f"knn-ssd:file={path}")
    path.write_text(json.dumps({**record, "fingerprint": "another"}))
    with pytest.raises(Refused, match="knn-ssd was calibrated for another model"):
        truedraft.accelerate(model, draft=f"knn-ssd:file={path}")
    path.write_text(json.dumps({**record, "subjects": {**subjects, "x": {**subjects["sums"], "layers": "9"}}}))
    with pytest.raises(Refused, match=r"layers \[9\] cannot be skipped"):
        truedraft.accelerate(model, draft=f"knn-ssd:file={path}")
