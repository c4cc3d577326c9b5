"""Shapes of draft models: acceptance by replay against the engine's own passes, and predictions from given times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import models
import truedraft
from test_distilling import learner, responded
from test_train import target, texts, tokenizer
from truedraft import Refused, registry
from truedraft.cli import main
from truedraft.train import drafter, shapes
from truedraft.train.batches import Reader
from truedraft.train.shapes import described, of_size, replayed

MOST = 5


@pytest.fixture(autouse=True)
def _many_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "HELD_OUT", 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model of it."""
    found = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    for folder, model in zip(found, (target(), models.sibling(target())), strict=True):
        model.float().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return found


def test_replay_gives_the_tokens_per_pass_of_the_engine() -> None:
    """For every length of drafts, with none to five tokens."""
    model = target()
    student, lines, read = models.sibling(model).float(), responded(model), Reader(model, ())
    found = replayed(student, [read(lines[:5]), read(lines[5:])], MOST)
    assert len(found) == MOST + 1 and found[0] == 1.0
    for length in range(1, MOST + 1):
        draft = registry.load("drafters", "draft-model", model=student, length=length)
        fast = truedraft.accelerate(model, draft=draft, control="fixed")
        tokens = passes = 0
        for ids, response in lines:
            fast.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
            tokens, passes = tokens + len(response) - 1, passes + len(fast.report().passes) - 1
        assert found[length] == round(tokens / passes, 3)
    assert 1 < found[1] < found[MOST]


@pytest.mark.parametrize(
    ("level", "drafted"), [(0.0, 3), (0.05, 2), (0.55, 1), (2.0, 0)], ids=["free", "cheap", "dear", "too dear"]
)
def test_length_and_rate_are_those_of_the_highest_quotient(level: float, drafted: int) -> None:
    """With passes of 1, 1.1, 1.4 and 1.5 seconds and 1, 1.8, 2.5 and 2.6 tokens of them, or 2.8."""
    passes, tokens = [1.0, 1.1, 1.4, 1.5], (1.0, 1.8, 2.5, 2.8 if level == 0 else 2.6)
    found = described("a", models.tiny(), level, passes, tokens)
    rates = [tokens[k] / (k * level + passes[k]) for k in range(4)]
    assert found.drafted == rates.index(max(rates)) == drafted and found.rate == pytest.approx(max(rates))
    assert found.needed == pytest.approx(min(passes[k] + k * level for k in (1, 2, 3)))
    alone = described("a", models.tiny(), level, passes)
    assert alone.drafted is None and alone.rate is None and alone.needed == found.needed


@pytest.mark.parametrize("layers", [1, 3])
def test_width_is_the_one_with_the_nearest_number_of_weights(layers: int) -> None:
    """Of multiples of the size of a head, by the weights of the models themselves."""
    config = models.tiny().config
    counts = {}
    for width in range(8, 97, 8):
        made = learner(target(), layers=layers, width=width)
        counts[width] = sum(weight.numel() for weight in made.module.parameters())
    for wanted in (counts[24], counts[40] + 9, counts[88] - 9):
        nearest = min(counts, key=lambda width: abs(counts[width] - wanted))
        assert of_size(config, layers, wanted, tied=True) == nearest
    with pytest.raises(Refused, match="--parameters 30: the narrowest draft model of"):
        of_size(config, layers, 30, tied=True)


def test_command_ranks_draft_models_by_the_rate(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given ones, and shapes that it trains on the responses that it made; the target does not respond again."""
    whole, draft = folders
    data, out = tmp_path / "lines.txt", tmp_path / "out"
    data.write_text("\n".join(texts(20)))
    monkeypatch.setattr(shapes, "level_seconds", lambda *args: 1e-9)
    monkeypatch.setattr(shapes, "pass_seconds", lambda target, context, widths: [1.0 + w / 100 for w in widths])
    base = ["shapes", "--target", str(whole), "--data", str(data), "--out", str(out), "--max-new-tokens", "9", "--json"]
    given: list[str] = [*base, "--model", str(draft), "--length", "4"]
    searched = ["--parameters", "3000", "--layers", "1", "--layers", "2"]
    assert main([*given, *searched, "--minutes", "0.01"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {shape["name"]: shape["layers"] for shape in found["shapes"]} == {str(draft): 2, "1x16": 1, "2x8": 2}
    rates = [shape["rate"] for shape in found["shapes"]]
    assert rates == sorted(rates, reverse=True) and found["pass_seconds"] == [1.01, 1.02, 1.03, 1.04, 1.05]
    for shape in found["shapes"]:
        assert len(shape["tokens_per_pass"]) == 5 and shape["drafted"] <= 4
        assert shape["rate"] == pytest.approx(
            shape["tokens_per_pass"][shape["drafted"]] / (1.01 + shape["drafted"] / 100)
        )
    assert (out / "1x16" / "model.safetensors").exists() and not (out / "1x16" / "responses").exists()

    def none(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the target was run")

    monkeypatch.setattr("truedraft.train.responses._generated", none)
    assert main([*given, *searched]) == 0
    again = {shape["name"]: shape for shape in json.loads(capsys.readouterr().out)["shapes"]}
    assert again[str(draft)] in found["shapes"] and again["1x16"]["rate"] is None
    assert main([*given[:-5], *given[-4:]]) == 0
    assert "Without drafts 1.0 tokens/s" in (printed := capsys.readouterr().out) and "speed-up" in printed


def test_times_are_measured(folders: tuple[Path, Path]) -> None:
    fast = truedraft.accelerate(target(), draft=None)
    passes = shapes.pass_seconds(fast.target, 20, range(1, 6))
    assert passes == sorted(passes) and passes[0] > 0
    level = shapes.level_seconds(truedraft.accelerate(models.sibling(target()).float(), draft=None).target, 20, 4)
    assert 0 < level < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "there is nothing to measure: give --model MODEL, or --parameters N"),
        (["--parameters", "9", "--length", "0"], "--length 0: give at least 1"),
        (["--model", "nano"], "nano has another tokenizer than the target"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], message: str, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "lines.txt"
    data.write_text("\n".join(texts(5)))
    base = ["shapes", "--target", str(folders[0]), "--data", str(data), "--out", str(tmp_path / "out")]
    assert main([*base, *options]) == 2
    assert message in capsys.readouterr().err
